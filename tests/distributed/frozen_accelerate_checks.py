"""PEFT's adapters over frozen codes through Accelerate's FSDP2 plug-in."""

from __future__ import annotations

import itertools

import pytest
import ranks
import torch
import torch.distributed as dist
from conversion_steps import take_steps
from frozen_checks import FORMATS, codes_of, parts_of
from fsdp2_accelerate_checks import accelerator
from fsdp2_training import mean, whole
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fp8_backends
from fp8_backends.errors import FP8BackendError, RecipeError
from fp8_backends.tensors.block_codes import SQUARE_CODES, BlockCodes
from fp8_backends.tensors.sharded_tensor import is_distributed, local_part

IDS = torch.arange(64).reshape(4, 16) * 5 % 64


def llama(layout=None, empty: bool = False) -> nn.Module:
    """Build from seed 0, with codes as its Linear layers' weights; `empty`: zeros, as on ranks
    that load no file."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=64, tie_word_embeddings=False, **sizes, **heads)
    model = LlamaForCausalLM(config).train().requires_grad_(False)
    for name, layer in model.named_modules():
        if layout is not None and name.endswith("_proj"):
            codes = codes_of(layer.weight.detach(), layout)
            layer.weight = nn.Parameter(codes, requires_grad=False)
    if empty:
        for p in model.parameters():
            for part in getattr(p, "parts", (p,)):
                part.detach().zero_()
    return model


def with_lora(model: nn.Module, **options) -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(
        r=8, lora_alpha=8, target_modules="all-linear", init_lora_weights="gaussian", **options
    )
    return get_peft_model(model, config).train()


def recipe(name: str) -> fp8_backends.FP8RecipeKwargs:
    _, backend, fp8_params = FORMATS[name]
    return fp8_backends.FP8RecipeKwargs(
        backend=backend, fp8_params=fp8_params, gradient_comm="plain"
    )


def prepared(name: str, empty: bool = False, lora: dict | None = None, **options):
    """Return (accelerator, model, optimizer)."""
    options = {"transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]} | options
    acc = accelerator(recipe(name), **options)
    model = with_lora(llama(FORMATS[name][0], empty), **(lora or {}))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    return acc, *acc.prepare(model, optimizer)


def train(acc, model, optimizer, steps: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


def base_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: p
        for name, p in model.named_parameters()
        if name.endswith("base_layer.weight") and "lm_head" not in name
    }


def check_efficient_loading_takes_the_first_ranks_codes():
    """The other ranks begin with zeros. Losses equal those of ranks that all have the codes."""
    for name in FORMATS:
        runs = []
        for efficient in (False, True):
            acc, model, optimizer = prepared(
                name,
                empty=efficient and dist.get_rank() > 0,
                cpu_ram_efficient_loading=efficient,
            )
            assert acc.state.fsdp_plugin.cpu_ram_efficient_loading == efficient
            runs.append(train(acc, model, optimizer))
            assert "state_dict" not in vars(model)
        assert runs[0] == runs[1] and runs[0][-1] < runs[0][0] - 0.2, (name, runs)
        assert len(base_of(model)) == 14 and all(map(is_distributed, model.parameters()))
        audit = fp8_backends.audit(model, optimizer.optimizer)
        assert sum(counts["wgrad"] for counts in audit.products.values()) == 0
        assert len(audit.products) >= 14


SAVED = ("fp8_params", "E4M3 in squares", "NVFP4")


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def check_full_and_sharded_states_resume_bitwise():
    """Accelerate's own files, for adapters and base, into a model with the same codes."""
    for name in SAVED:
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            folder = ranks.shared_folder()
            acc, model, optimizer = prepared(name, state_dict_type=kind)
            train(acc, model, optimizer, 2)
            acc.save_state(folder)
            expected = train(acc, model, optimizer, 2)
            acc, model, optimizer = prepared(name, state_dict_type=kind)
            codes = [parts_of(local_part(p)) for p in base_of(model).values()]
            values = values_of(model)
            acc.load_state(folder)
            assert train(acc, model, optimizer, 2) == expected, (name, kind)
            after = values_of(model)
            assert all(torch.equal(after[key], values[key]) for key in base_of(model)), (name, kind)
            if FORMATS[name][0] is None:
                continue  # loaded values may get a finer scale
            for parts, p in zip(codes, base_of(model).values(), strict=True):
                assert all(map(torch.equal, parts, parts_of(local_part(p)))), (name, kind)


def check_whole_state_dict_is_plain_and_loads_without_ranks():
    """Its values are those of the codes; a plain model takes base and adapters."""
    for name in SAVED:
        acc, model, optimizer = prepared(name)
        train(acc, model, optimizer, 2)
        state = acc.get_state_dict(model)
        if not acc.is_main_process:
            continue
        assert {type(value) for value in state.values()} == {torch.Tensor}
        plain = with_lora(llama())
        plain.load_state_dict(state)
        frozen = with_lora(llama(FORMATS[name][0]))
        if FORMATS[name][0] is None:
            fp8_backends.prepare(frozen, None, recipe(name))
        for key, value in base_of(frozen).items():
            assert torch.equal(state[key], value.exact()), (name, key)
        adapters = get_peft_model_state_dict(plain)
        assert adapters and all("lora_" in key for key in adapters)


def check_restored_shards_merge_adapters():
    """Merge on all ranks, in the shards themselves."""
    for name in SAVED:
        acc, model, optimizer = prepared(name)
        train(acc, model, optimizer, 2)
        if FORMATS[name][0]:
            with pytest.raises(FP8BackendError, match=r"restore\(model\) makes weights plain"):
                model.merge_adapter()
        before = values_of(model)
        with torch.no_grad():
            logits = model.eval()(IDS).logits
        fp8_backends.restore(model)
        after = values_of(model)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before), name
        assert all(type(local_part(p)) is torch.Tensor for p in model.parameters()), name
        model.merge_adapter()
        for key, value in base_of(model).items():
            place = key.removesuffix("base_layer.weight")
            up, down = (before[f"{place}lora_{part}.default.weight"] for part in "BA")
            # lora_alpha / r = 1
            torch.testing.assert_close(whole(value), before[key] + up @ down)
        with torch.no_grad():
            gap = (model.eval()(IDS).logits - logits).abs().max()
        assert gap < 0.1 * logits.abs().max(), (name, gap)
        model.unmerge_adapter()
        for key, value in base_of(model).items():
            torch.testing.assert_close(whole(value), before[key])


def check_dora_and_activation_checkpointing():
    for name in SAVED:
        for lora, options in (
            ({"use_dora": True}, {}),
            ({}, {"activation_checkpointing": True}),
            ({}, {"cpu_offload": CPUOffloadPolicy(pin_memory=False)}),
        ):
            losses = train(*prepared(name, lora=lora, **options), 3)
            assert losses[-1] < losses[0] - 0.1, (name, lora, options, losses)


def check_export_writes_the_codes():
    """Of a sharded base: in the file's own layout, without a rounding."""
    for name, format in (
        ("E4M3 in squares", "finegrained_fp8"),
        ("NVFP4", "nvfp4-pack-quantized"),
        ("MXFP4", "mxfp4-pack-quantized"),
    ):
        layout, plain = FORMATS[name][0], llama(FORMATS[name][0])
        model = llama(layout)
        fp8_backends.prepare(model, None, recipe(name))
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        folder = ranks.shared_folder()
        result = fp8_backends.checkpoints.export(model, folder, format)
        assert len(result.exact) == 14, (name, result)
        tensors = load_file(f"{folder}/model.safetensors")
        for key, weight in plain.named_parameters():
            if key.endswith("_proj.weight"):
                prefix = key.removesuffix("weight")
                for part, expected in zip(layout.parts, weight.parts, strict=True):
                    assert same_bits(tensors[f"{prefix}{part}"], expected), (name, key, part)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def mixtral(parameters: list[str], frozen: bool) -> nn.Module:
    """Build from seed 0, adapters on attention and experts; `frozen`: codes in squares as the
    weights of experts, else their values."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "num_local_experts": 3}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=64, **sizes, **heads)).train()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            matrices = [codes_of(each, SQUARE_CODES).parts for each in experts._parameters[name]]
            parts = [torch.stack(part).detach() for part in zip(*matrices, strict=True)]
            codes = BlockCodes(parts, torch.float32)
            weight = codes if frozen else codes.exact()
            experts._parameters[name] = nn.Parameter(weight, requires_grad=False)
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        target_parameters=parameters,
        init_lora_weights=False,
    )
    return get_peft_model(model, config).train()


def check_adapters_on_experts_of_codes():
    """Under FSDP2 and DDP as without ranks, over codes as over their values: losses to the bit. The
    codes stay. Two ranks have two experts and one."""
    runs = {}
    ways = ("alone", "ddp", "fsdp2")
    values = ("alone over values", "fsdp2 over values")
    for kind, parameters in (
        *itertools.product((*ways, *values), [EXPERTS]),
        # the other weight has FP8 products with the codes, not those of its values
        *itertools.product(ways, [EXPERTS[1:]]),
    ):
        model = mixtral(parameters, frozen=kind in ways)
        before = [p.detach() for p in model.parameters() if isinstance(p, BlockCodes)]
        runs[kind, len(parameters)] = losses_of(model, kind)
        found = [p for p in model.parameters() if isinstance(local_part(p), BlockCodes)]
        assert len(found) == len(before) == (4 if kind in ways else 0)
        for p, file in zip(found, before, strict=True):
            own = local_part(p)
            first = 2 * dist.get_rank() if is_distributed(p) else 0
            pairs = zip((*own.parts, own.exact()), (*file.parts, file.exact()), strict=True)
            assert all(same_bits(part, entire[first : first + len(own)]) for part, entire in pairs)
    for (_, number), losses in runs.items():
        assert losses == runs["alone", number] and losses[-1] < losses[0], runs
    assert runs["alone", 1] != runs["alone", 2]


def losses_of(model: nn.Module, kind: str) -> list[float]:
    spec = {"backend": "native:blockwise", "fp8_params": True, "gradient_comm": "plain"}
    fp8_backends.prepare(model, None, spec)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if "fsdp2" in kind:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    fp8_backends.prepare(model, optimizer, spec)
    return take_steps(lambda: model(input_ids=IDS, labels=IDS).loss, optimizer, 3)


def check_levels_and_fsdp1_are_refused_by_name():
    acc = accelerator("msamp:O2", transformer_cls_names_to_wrap=["LlamaDecoderLayer"])
    model = with_lora(llama(FORMATS["NVFP4"][0]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(RecipeError, match="does not multiply frozen NVFP4 codes"):
        acc.prepare(model, optimizer)
    with pytest.raises(RecipeError, match="does not go with these sharded weights"):
        accelerator(recipe("fp8_params"), version=1)


if __name__ == "__main__":
    ranks.main(globals())
