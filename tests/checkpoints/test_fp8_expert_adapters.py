"""PEFT's adapters on FP8 experts of a checkpoint: they add to the values, and the codes stay."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from conversion_steps import take_steps
from peft import LoraConfig, PeftModel, get_peft_model
from test_fp8_experts import BLOCKWISE, dequantized, loaded
from tiny_checkpoints import same_bits
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError, RecipeError, checkpoints
from fp8_backends.formats.formats import E4M3
from fp8_backends.formats.scaling import SQUARES
from fp8_backends.kernels import nvfp4
from fp8_backends.tensors.block_codes import BlockCodes

IDS = torch.arange(32).reshape(2, 16) * 5 % 64
BOTH = ("experts.gate_up_proj", "experts.down_proj")
UP, DOWN = BOTH[:1], BOTH[1:]
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}


def pair(family: str) -> tuple[nn.Module, nn.Module]:
    """Return a model of an FP8 checkpoint before `freeze_codes`, and the one with its values. Its
    scales are those of native:blockwise, which therefore casts these values to the same codes."""
    model, plain = loaded(family)
    values = dict(plain.named_parameters())
    for name, module in model.named_modules():
        for key in [key for key in module._parameters if f"{key}_scale_inv" in module._parameters]:
            value = torch.randn(module._parameters[key].shape).mul_(0.05)
            matrices = [SQUARES.quantize(each, E4M3) for each in value.view(-1, *value.shape[-2:])]
            codes, scales = (torch.stack(parts) for parts in zip(*matrices, strict=True))
            scales = scales.view(module._parameters[f"{key}_scale_inv"].shape)
            module._parameters[key].data.copy_(codes.view(value.shape))
            module._parameters[f"{key}_scale_inv"].data.copy_(scales)
            exact = dequantized(module._parameters[key], scales)
            values[f"{name}.{key}"].data.copy_(exact)
    for each in (model, plain):
        each.set_experts_implementation("grouped_mm")
    return model, plain


def adapted(model: nn.Module, *parameters: str, **options) -> nn.Module:
    torch.manual_seed(1)
    options = {"target_modules": []} | options
    config = LoraConfig(r=4, target_parameters=list(parameters), init_lora_weights=False, **options)
    return get_peft_model(model, config).train()


def trained_steps(model: nn.Module, spec, steps: int) -> tuple[list[float], dict]:
    """Return losses, and the trained Parameters."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3)
    fp8_backends.prepare(model, optimizer, spec)
    losses = take_steps(lambda: model(input_ids=IDS, labels=IDS).loss, optimizer, steps)
    return losses, trained


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def codes_of(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Copy codes and scales of all frozen codes, experts and Linears, by the name in the file."""
    return {
        name.replace("base_model.model.", "").replace("base_layer.", ""): [
            part.clone() for part in p.parts
        ]
        for name, p in model.named_parameters()
        if isinstance(p, BlockCodes)
    }


def file_of(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Copy codes and scales as transformers loads them."""
    return {
        name: [p.detach().clone(), parameters[scale].detach().clone()]
        for parameters in [dict(model.named_parameters())]
        for name, p in parameters.items()
        if (scale := f"{name}_scale_inv") in parameters
    }


def check_codes(model: nn.Module, file: dict[str, list[torch.Tensor]]) -> None:
    """Compare codes and scales of all experts and Linears with those of the file, to the bit."""
    found = codes_of(model)
    assert found.keys() == file.keys() and len(file) == 12
    for name, parts in file.items():
        assert all(map(same_bits, found[name], parts)), name


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return (
        bool(ours)
        and ours.keys() == theirs.keys()
        and all(torch.equal(ours[name], theirs[name]) for name in ours)
    )


@pytest.mark.parametrize(
    "family, parameters, steps",
    [("mixtral", BOTH, 6), ("qwen3_moe", DOWN, 3), ("mixtral", UP, 3)],
    ids=["both", "down", "gate_up"],
)
def test_adapters_on_experts_train_as_over_the_dequantized_base(family, parameters, steps):
    """Losses, gradients and adapters to the bit; codes and scales stay the file's."""
    model, plain = pair(family)
    file = file_of(model)
    assert len(checkpoints.freeze_codes(model)) == 10
    model, plain = (adapted(each, *parameters, **ATTENTION) for each in (model, plain))
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    losses, trained = trained_steps(model, BLOCKWISE, steps)
    expected, reference = trained_steps(plain, "native:blockwise", steps)
    assert losses == expected and losses[-1] < losses[0]
    assert equal(trained, reference)
    assert equal(gradients(model), gradients(plain))
    check_codes(model, file)
    audit = fp8_backends.audit(model)
    experts = [counts for name, counts in audit.products.items() if "experts" in name]
    assert len(experts) == 2 * (2 - len(parameters)) and not audit.foreign_fp8
    for counts in experts:
        assert counts["fprop"] == counts["dgrad"] == steps + 1 and not counts["wgrad"]


def test_arbitrary_scales_and_no_fp8_products():
    """Without `prepare`, a model of codes equals the dequantized one to the bit: losses, and
    gradients of adapters on both weights, with recomputed layers, too."""
    model, plain = loaded("mixtral")
    model.requires_grad_()
    checkpoints.freeze_codes(model)
    assert not any(p.requires_grad for p in model.parameters() if isinstance(p, BlockCodes))
    for each in (model, plain):
        each.set_experts_implementation("grouped_mm")
    model, plain = adapted(model, *BOTH), adapted(plain, *BOTH)
    expected = gradients(plain)
    assert equal(gradients(model), expected)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert equal(gradients(model), expected)
    with torch.no_grad():
        ours, theirs = (each.eval()(input_ids=IDS).logits for each in (model, plain))
    assert torch.equal(ours, theirs)


def routed(experts: int) -> tuple[torch.Tensor, ...]:
    """Return hidden states, the two experts of each token, and their weights."""
    torch.manual_seed(2)
    ids = torch.rand(24, experts).topk(2)[1]
    ids[ids == 1] = 3  # an expert without tokens
    hidden = torch.randn(24, 128, dtype=torch.bfloat16, requires_grad=True)
    return hidden, ids, torch.rand(24, 2, dtype=torch.bfloat16)


def test_products_equal_those_of_a_linear_for_each_expert():
    """Codes with any scales are multiplied as they are: results and gradients to the bit."""
    model, _ = loaded("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.limit = 0.1  # of a family that clamps
    linears = nn.ModuleDict()
    for name in ("gate_up_proj", "down_proj"):
        weight, scales = (experts._parameters[f"{name}{end}"] for end in ("", "_scale_inv"))
        for index, (codes, scale) in enumerate(zip(weight, scales, strict=True)):
            linear = nn.Linear(*reversed(codes.shape), bias=False)
            codes = BlockCodes((codes.clone(), scale.clone()), torch.bfloat16)
            linear.weight = nn.Parameter(codes, requires_grad=False)
            linears[f"{name}{index}"] = linear
    ours = nn.ModuleDict({"experts": experts})
    for each in (ours, linears):
        fp8_backends.prepare(each.train(), None, BLOCKWISE)
    hidden, ids, weights = routed(4)
    y = experts(hidden, ids, weights)
    gradient = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, hidden, gradient)
    rows = hidden.repeat_interleave(2, 0)
    parts = torch.zeros_like(rows)
    for index in range(4):
        (places,) = torch.where(ids.flatten() == index)
        if len(places):
            gate, up = linears[f"gate_up_proj{index}"](rows[places]).chunk(2, -1)
            gated = F.silu(gate.clamp(max=0.1)) * up.clamp(-0.1, 0.1)
            down = linears[f"down_proj{index}"](gated)
            parts = parts.index_copy(0, places, down)
    expected = (parts * weights.view(-1, 1)).view(24, 2, -1).sum(1)
    assert torch.equal(y, expected)
    assert torch.equal(dx, *torch.autograd.grad(expected, hidden, gradient))
    found = fp8_backends.audit(ours).products
    assert set(found) == {"experts.gate_up_proj", "experts.down_proj"}


def test_files_of_adapters_and_states_of_codes(tmp_path):
    """A file of adapters continues over the same codes to the bit. States hold plain values, and
    codes take their own only; they pickle."""
    model, _ = pair("qwen3_moe")
    checkpoints.freeze_codes(model)
    base = copy.deepcopy(model)
    model = adapted(model, *BOTH)
    trained_steps(model, BLOCKWISE, 2)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).train()
    fp8_backends.prepare(again, None, BLOCKWISE)
    assert equal(gradients(again), gradients(model))
    file = codes_of(model)
    again.load_state_dict(model.state_dict())
    plain = {name: tensor + 0 for name, tensor in model.state_dict().items()}
    assert {type(tensor) for tensor in plain.values()} == {torch.Tensor}
    again.load_state_dict(plain)
    check_codes(again, file)
    name = next(name for name in plain if name.endswith("down_proj"))
    with pytest.raises(RuntimeError, match="cannot take other values"):
        again.load_state_dict({name: plain[name] * 2}, strict=False)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert equal(torch.load(buffer, weights_only=True), model.state_dict())
    check_codes(pickle.loads(pickle.dumps(base)), file)


def test_adapters_are_merged_and_unmerged_over_plain_values():
    """Merging into codes is refused by name, and its ways out lead to the values of PEFT over a
    plain base."""
    model, plain = pair("mixtral")
    checkpoints.freeze_codes(model)
    model, plain = adapted(model, *DOWN), adapted(plain, *DOWN)
    fp8_backends.prepare(model, None, BLOCKWISE)
    for merge in (model.merge_adapter, lambda: model.merge_adapter(safe_merge=True)):
        with pytest.raises(FP8BackendError, match=r"checkpoints.dequantize\(model\) also those of"):
            merge()
    fp8_backends.restore(model)
    names = checkpoints.dequantize(model)
    prefix = "base_model.model.model.layers"
    assert names == [f"{prefix}.{index}.mlp.experts.base_layer" for index in range(2)]
    for each in (model, plain):
        each.merge_adapter()
    assert equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    for each in (model, plain):
        each.unmerge_adapter()
    assert equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    model, plain = model.merge_and_unload(), plain.merge_and_unload()
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS).logits, plain.eval()(IDS).logits)


def test_plain_weights_for_a_while_and_export(tmp_path):
    model, plain = pair("mixtral")
    file = file_of(model)
    fp8_backends.prepare(model, None, BLOCKWISE)
    with checkpoints.plain_weights(model):
        assert equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert checkpoints.dequantize(model) == [], "a prepared model keeps its codes"
    check_codes(model, file)
    checkpoints.export(model, tmp_path)
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    values = dict(again.named_parameters())
    assert equal(values, {name: p for name, p in plain.named_parameters() if name in values})
    fp8_backends.restore(model)
    assert equal(dict(model.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("block", [[128, 128], None], ids=["squares", "an expert"])
def test_dequantized_experts_are_plain(block):
    """Also with one scale for an expert, which `freeze_codes` leaves to transformers."""
    model, plain = loaded("mixtral")
    if block is None:
        for layer, other in zip(model.model.layers, plain.model.layers, strict=True):
            experts, values = layer.mlp.experts, other.mlp.experts
            experts.block_size = None
            for name in ("gate_up_proj", "down_proj"):
                scales = torch.rand(4, 1, 1) * 1e-3
                experts._parameters[f"{name}_scale_inv"].data = scales
                codes = experts._parameters[name]
                values._parameters[name].data.copy_(codes.float() * scales)
        assert not any("experts" in name for name in checkpoints.freeze_codes(model))
    assert "model.layers.1.mlp.experts" in checkpoints.dequantize(model)
    assert equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert not any("scale" in name for name in model.state_dict())


@pytest.mark.parametrize("function", [checkpoints.freeze_codes, checkpoints.dequantize])
def test_damaged_and_missing_scales_are_refused_by_name(function):
    for damage, reason in (
        (lambda scales: scales.clone().fill_(torch.nan), "its scales are damaged"),
        (lambda scales: scales[:, :1].repeat(1, 3, 1), r"\(4, 3, 1\) hold no weight of shape"),
        (lambda scales: scales[:2].clone(), r"\(2, 2, 1\) hold no weight of shape"),
        (lambda scales: None, "no matrix of E4M3 codes with scales"),
    ):
        model, _ = loaded("mixtral")
        experts = model.model.layers[1].mlp.experts
        scales = damage(experts.gate_up_proj_scale_inv.detach())
        scales = scales if scales is None else nn.Parameter(scales, requires_grad=False)
        experts.gate_up_proj_scale_inv = scales
        name = r"layers.1.mlp.experts.gate_up_proj, FP8Experts of transformers"
        with pytest.raises(FP8BackendError, match=f"{name}: .*{reason}.*dequantize=True"):
            function(model)
        with pytest.raises(FP8BackendError, match=name):
            fp8_backends.prepare(model, None, BLOCKWISE)
        assert type(model.model.layers[0].mlp.experts).__name__ == "FP8Experts"


def test_experts_of_gpus_and_of_several_ranks_stay_with_transformers():
    """It has kernels for GPUs; each rank holds some of the experts only."""
    model, _ = loaded("mixtral")
    ours, theirs = (layer.mlp.experts for layer in copy.deepcopy(model).model.layers)
    mixed = nn.ModuleDict({"ours": ours, "experts": theirs.to("meta"), "up": nn.Linear(32, 32)})
    fp8_backends.prepare(mixed.requires_grad_(False), None, BLOCKWISE)
    assert type(theirs).__name__ == "FP8Experts" and type(ours).__name__ == "FrozenExperts"
    assert {name.split(".")[0] for name in fp8_backends.audit(mixed).products} == {"ours", "up"}
    for layer in model.model.layers:
        layer.mlp.experts._is_expert_parallel = True
    assert not any("experts" in name for name in checkpoints.freeze_codes(model))
    with pytest.raises(FP8BackendError, match="experts.gate_up_proj: its codes are sharded"):
        checkpoints.dequantize(model)


def test_other_recipes_are_refused_by_name():
    model, _ = loaded("mixtral")
    checkpoints.freeze_codes(model)
    model = adapted(model, *DOWN)
    for spec in ("native:dynamic", {"backend": "native:rowwise", "fp8_params": True}, "msamp:O2"):
        with pytest.raises(RecipeError, match="does not multiply frozen E4M3 codes.*blockwise"):
            fp8_backends.prepare(model, None, spec)


def mxfp4_gpt_oss(folder) -> dict[str, torch.Tensor]:
    """Write a tiny GPT-OSS with experts in MXFP4, as OpenAI does. Return its tensors."""
    from safetensors.torch import save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    config = GptOssConfig(vocab_size=64, num_experts_per_tok=2, **sizes, **heads)
    config.quantization_config = {"quant_method": "mxfp4"}
    tensors = GptOssForCausalLM(config).bfloat16().state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16)).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 123, shape).to(torch.uint8)
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def test_adapters_train_over_mxfp4_experts_that_transformers_dequantizes(tmp_path):
    """Without triton kernels for MXFP4 it loads plain values; both adapters train over them."""
    from transformers import AutoModelForCausalLM

    tensors = mxfp4_gpt_oss(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.experts.down_proj"
    numbers = nvfp4.unpacked(tensors[f"{name}_blocks"].flatten(2)[0])
    scales = torch.exp2(tensors[f"{name}_scales"][0].float() - 127).repeat_interleave(32, 1)
    before = model.model.layers[0].mlp.experts.down_proj.detach().clone()
    assert torch.equal(before[0].t(), (numbers * scales).bfloat16())
    model = adapted(model, *DOWN, target_modules=["q_proj", "v_proj"])
    losses, trained = trained_steps(model, "native:dynamic", 4)
    assert losses[-1] < losses[0] and any("experts" in name for name in trained)
    after = dict(model.named_parameters())
    assert torch.equal(next(p for n, p in after.items() if n.endswith("down_proj")), before)
    assert any("q_proj" in name for name in fp8_backends.audit(model).products)
