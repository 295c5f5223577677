"""LoRA that takes over `forward`, as in kohya's sd-scripts, LyCORIS and OneTrainer: the original
Linear runs in FP8, the adapter in high precision."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from conversion_steps import take_steps
from torch import nn

import fp8_backends
from fp8_backends import FP8BackendError


class Kohya(nn.Module):
    """The steps of sd-scripts' `LoRAModule`: `apply_to` drops the module, and keeps its forward."""

    def __init__(self, org_module: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.lora_down = nn.Linear(org_module.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, org_module.out_features, bias=False)
        nn.init.normal_(self.lora_up.weight, std=0.1)
        self.org_module = org_module

    def apply_to(self) -> None:
        self.org_forward = self.org_module.forward
        self.org_module.forward = self.forward
        del self.org_module

    def forward(self, x):
        return self.org_forward(x) + self.lora_up(self.lora_down(x))


class Lycoris(Kohya):
    """LyCORIS keeps the module in a list, and rebuilds its weight unless `bypass_mode` is set."""

    bypass_mode = True

    def apply_to(self) -> None:
        self.__dict__["kept"] = [self.org_module]
        super().apply_to()

    def forward(self, x):
        if self.bypass_mode:
            return super().forward(x)
        base = self.kept[0]
        weight = base.weight + self.lora_up.weight @ self.lora_down.weight
        return nn.functional.linear(x, weight.to(x.dtype), base.bias)


class OneTrainer(Kohya):
    def apply_to(self) -> None:
        self.orig_forward = self.org_module.forward
        self.org_module.forward = self.forward
        del self.org_module

    def forward(self, x):
        return self.orig_forward(x) + self.lora_up(self.lora_down(x))


class Inline(nn.Module):
    """The same numbers in one tree: a Linear, and an adapter beside it."""

    def __init__(self, base: nn.Linear, adapter: Kohya) -> None:
        super().__init__()
        self.base, self.adapter = base, adapter

    def forward(self, x):
        return self.base(x) + self.adapter.lora_up(self.adapter.lora_down(x))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).requires_grad_(False)


def adapters_for(model: nn.Module, cls: type = Kohya) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList(cls(layer) for layer in model.modules() if type(layer) is nn.Linear)


def apply(network: nn.ModuleList) -> None:
    for adapter in network:
        adapter.apply_to()


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))


def train(model: nn.Module, network: nn.Module, spec, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    fp8_backends.prepare(model, optimizer, spec)
    return take_steps(lambda: model(X).square().mean(), optimizer, steps)


def reference(spec) -> list[float]:
    model = net()
    network = adapters_for(model)
    for adapter, place in zip(network, (0, 2), strict=True):
        del adapter.org_module
        model[place] = Inline(model[place], adapter)
    exclude = {"backend": spec, "exclude": "*lora_*"}
    return train(model, network, exclude)


@pytest.mark.parametrize(
    ("cls", "spec"),
    [(Kohya, "native:delayed"), (Lycoris, "ao:tensorwise"), (OneTrainer, "native:dynamic")],
)
def test_original_runs_in_fp8_in_both_orders(cls, spec):
    expected = reference(spec)
    for applied_first in (True, False):
        model = net()
        network = adapters_for(model, cls)
        if applied_first:
            apply(network)
        else:
            fp8_backends.prepare(model, None, spec)
            apply(network)
        assert train(model, network, spec) == expected
        audit = fp8_backends.audit(model)
        assert set(audit.products) == {"0", "2"}
        assert all(counts["fprop"] >= 1 for counts in audit.products.values())
        names = {f"{place}.{cls.__name__}.lora_{part}" for place in "02" for part in ("down", "up")}
        assert audit.high_precision.keys() == names
        assert all("adapter beside the model" in why for why in audit.high_precision.values())
        assert 0.7 < audit.flops_share < 0.95, "products of adapters count"


@pytest.mark.parametrize("applied_first", [True, False])
def test_restoring_gives_the_adapter_the_plain_forward(applied_first):
    model = net()
    network = adapters_for(model)
    if applied_first:
        apply(network)
    fp8_backends.prepare(model, None, "native:dynamic")
    if not applied_first:
        apply(network)
    in_fp8 = model(X)
    fp8_backends.restore(model)
    stock = net()
    apply(adapters_for(stock))
    assert torch.equal(model(X), stock(X)) and not torch.equal(in_fp8, stock(X))
    fp8_backends.prepare(model, None, "native:dynamic")
    assert torch.equal(model(X), in_fp8)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(copied(X), in_fp8)


def test_adapters_over_adapters_and_hooks_reach_the_original():
    model = net()
    add_hook_to_module(model[0], ModelHook())
    inner, outer = adapters_for(model), adapters_for(model, Lycoris)
    apply(inner)
    apply(outer)
    train(model, nn.ModuleList([inner, outer]), "native:dynamic")
    assert set(fp8_backends.audit(model).products) == {"0", "2"}
    assert len(fp8_backends.audit(model).high_precision) == 8


def test_rebuilt_weights_are_named_as_layers_without_products(caplog):
    model = net()
    network = adapters_for(model, Lycoris)
    apply(network)
    network[1].bypass_mode = False
    with caplog.at_level(logging.WARNING):
        train(model, network, "native:dynamic", 1)
    assert "layers without products: 2" in caplog.text
    network[0].bypass_mode = False
    again = net()
    network = adapters_for(again, Lycoris)
    apply(network)
    for adapter in network:
        adapter.bypass_mode = False
    with pytest.raises(FP8BackendError, match="no FP8 product ran in the first training step"):
        train(again, network, "native:dynamic", 1)


def test_forward_that_keeps_no_original_stays_in_high_precision():
    class Own(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.__dict__["base"] = base

        def forward(self, x):
            return nn.functional.linear(x, self.base.weight)

    model = net()
    model[0].forward = Own(model[0]).forward
    fp8_backends.prepare(model, None, "native:dynamic")
    reasons = fp8_backends.audit(model).high_precision
    assert "forward was replaced on the instance" in reasons["0"]


def test_optimizer_of_neither_model_nor_adapter_is_refused():
    model = net()
    apply(adapters_for(model))
    with pytest.raises(FP8BackendError, match="holds no parameter of the prepared model"):
        train(model, nn.Linear(2, 2), "native:dynamic")


# sd-scripts: `fp8_base` over diffusers' UNet


def unet(dtype: torch.dtype) -> tuple[nn.Module, nn.ModuleList]:
    """In the order of train_network.py: LoRA over the Linears of transformers, then the cast."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).requires_grad_(False)
    transformers = [m for m in model.modules() if type(m).__name__ == "Transformer2DModel"]
    network = adapters_for(nn.ModuleList(transformers))
    apply(network)
    model.to(FLOAT8).to(dtype)
    for module in model.modules():
        if isinstance(module, (nn.GroupNorm, nn.LayerNorm)):
            module.float()  # CUDA's autocast casts parameters of norms, the CPU's does not
    return model.train(), network


FLOAT8 = torch.float8_e4m3fn


def sd_scripts(dtype: torch.dtype, **fields) -> tuple[nn.Module, list[float]]:
    """Prepare the base, then the network with its optimizer, and train."""
    recipe = fp8_backends.FP8RecipeKwargs(backend="native:dynamic", autocast_dtype="bf16", **fields)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model, network = unet(dtype)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    model = accelerator.prepare(model)
    network, optimizer = accelerator.prepare(network, optimizer)
    torch.manual_seed(3)
    images, noise, text = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8), torch.randn(2, 5, 32)
    losses = []
    for _ in range(20):
        with accelerator.autocast():
            y = model(images + noise, torch.tensor([5, 9]), encoder_hidden_states=text).sample
            loss = (y.float() - noise).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.nightly
def test_lora_of_sd_scripts_trains_over_fp8_base(caplog):
    pytest.importorskip("diffusers")
    with caplog.at_level(logging.INFO):
        model, losses = sd_scripts(FLOAT8)
    proofs = [r.getMessage() for r in caplog.records if "of weight FLOPs in FP8" in r.getMessage()]
    assert len(proofs) == 1 and "fprop dgrad" in proofs[0]
    assert "ModuleList has no layer for FP8: it trains without" in caplog.text, "the network"
    base, _ = unet(FLOAT8)
    audit = fp8_backends.audit(model)
    adapted = {name for name, module in base.named_modules() if "forward" in vars(module)}
    assert adapted and audit.products.keys() >= adapted
    for name in audit.products:
        codes = model.get_submodule(name).weight.parts[0]
        assert codes.view(torch.uint8).equal(base.get_submodule(name).weight.view(torch.uint8))
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert convolutions and all(m.weight.dtype == FLOAT8 for m in convolutions)
    assert sum("Kohya" in name for name in audit.high_precision) == 2 * len(adapted)
    _, expected = sd_scripts(torch.bfloat16, fp8_params=True)
    assert losses == expected and losses[-1] < losses[0]
