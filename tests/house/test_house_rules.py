"""The rules of the design, one test each, on a small tied language model; details are tested part
by part elsewhere."""

import copy
import textwrap

import pytest
import reference
import safetensors.torch
import torch
import warm_process
from torch import nn

import fp8_backends
from fp8_backends.convert.conversion import prepared_roots
from fp8_backends.formats.formats import E4M3, E5M2
from fp8_backends.recipes.fields import FIELDS

BACKENDS = ["native:dynamic", "native:delayed", "ao:tensorwise", "msamp:O1", "msamp:O2", "msamp:O3"]


class Language(nn.Module):
    """Build an embedding, two feed-forward layers, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return self.lm_head(hidden + self.frozen(hidden))


def made():
    torch.manual_seed(0)
    model = Language()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def step(model, optimizer, seed):
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(seed))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1, 1).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rule_1_no_parameter_is_lost(backend):
    """Prepare in mid-training: same objects, ties, flags, hooks and optimizer state, and everything
    moves."""
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    model.up.register_forward_hook(lambda *_: calls.append(1))
    step(model, optimizer, 0)
    parameters, exp_avg = (
        dict(model.named_parameters()),
        optimizer.state[model.up.weight]["exp_avg"],
    )
    same_model, same_optimizer = fp8_backends.prepare(model, optimizer, backend)
    assert same_model is model and same_optimizer is optimizer
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert model.lm_head.weight is model.embed.weight and not model.frozen.weight.requires_grad
    kept = optimizer.state[model.up.weight]["exp_avg"]
    if backend in ("msamp:O2", "msamp:O3"):  # stored in E4M3 from here on: half a step of it, 2**-4
        torch.testing.assert_close(kept.dequantize(), exp_avg, rtol=2**-4, atol=1e-6)
    else:
        assert kept is exp_avg or torch.equal(kept, exp_avg)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    step(model, optimizer, 1)
    scheduler.step()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    assert len(calls) == 2 and optimizer.state[model.up.weight]["step"] == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_rule_2_fp8_is_proven_never_assumed(backend, capsys):
    model, optimizer = made()
    fp8_backends.prepare(model, optimizer, backend)
    assert fp8_backends.audit(model, optimizer).flops_share == 0.0  # converted, and nothing has run
    step(model, optimizer, 0)
    assert "3/4 Linear" in capsys.readouterr().err
    audit = fp8_backends.audit(model, optimizer)
    assert {name: counts["fprop"] for name, counts in audit.products.items()} == {
        "up": 1,
        "down": 1,
        "frozen": 1,
    }
    assert "head" in audit.high_precision["lm_head"]
    # TorchAO multiplies for a frozen weight too, and autograd drops the result: counted, since it
    # ran
    assert audit.products["frozen"]["wgrad"] == (1 if backend.startswith("ao") else 0)
    # planted: the layers are converted, and the forward goes around them
    model, optimizer = made()
    fp8_backends.prepare(model, optimizer, backend)
    model.forward = lambda tokens: model.embed(tokens) @ model.embed.weight.t()
    with pytest.raises(fp8_backends.FP8BackendError, match="no FP8 product ran"):
        step(model, optimizer, 0)


OTHER_THAN_THE_DEFAULT = {
    "margin": 2,
    "interval": 2,
    "amax_history_len": 4,
    "amax_compute_algo": "max",
    "use_mxfp8_block_scaling": True,
    "pad_inner_dim": True,
    "rounding": "nearest",
}


@pytest.mark.parametrize("name", OTHER_THAN_THE_DEFAULT)
def test_rule_3_given_values_are_used(name):
    """`native:dynamic` reads none of these fields: each is refused by name, and none is dropped."""
    assert name in FIELDS or name == "use_mxfp8_block_scaling"
    with pytest.raises(fp8_backends.RecipeError, match=name.split("_")[0]):
        fp8_backends.FP8RecipeKwargs(
            backend="native:dynamic", **{name: OTHER_THAN_THE_DEFAULT[name]}
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_rule_4_high_precision_is_the_fallback_layer_by_layer(backend):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32).double(), nn.Linear(32, 32))
    model[1].forward = lambda x: nn.functional.linear(
        x.double(), model[1].weight, model[1].bias
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fp8_backends.prepare(model, optimizer, backend)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    audit = fp8_backends.audit(model, optimizer)
    assert list(audit.products) == ["0", "2"] and list(audit.high_precision) == ["1"]
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_rule_5_the_reference_defines_the_numbers():
    model = nn.Sequential(nn.Linear(40, 24, bias=False))
    fp8_backends.prepare(model, None, "native:dynamic")
    x, dy = torch.randn(16, 40, requires_grad=True), torch.randn(16, 24)
    y = model(x)
    y.backward(dy)
    expected = reference.linear(x.detach(), model[0].weight.detach(), dy, E4M3, E5M2, "dynamic")
    for ours, exact in zip((y, x.grad, model[0].weight.grad), expected, strict=True):
        # fp32 results: nothing but the order of summation between them
        assert (ours - exact).abs().max() <= 2**-19 * exact.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rule_6_no_process_wide_state(backend):
    """A copy, another recipe and evaluation in between do not change a bit of a run."""
    alone = [
        step(*pair, seed) for pair in [fp8_backends.prepare(*made(), backend)] for seed in range(5)
    ]
    model, optimizer = fp8_backends.prepare(*made(), backend)
    other, other_optimizer = fp8_backends.prepare(*made(), "native:rowwise")
    losses = []
    for seed in range(5):
        losses.append(step(model, optimizer, seed))
        teacher = copy.deepcopy(model)
        with torch.no_grad():
            teacher(torch.randint(64, (2, 16)))
            model.eval()(torch.randint(64, (2, 16)))
            model.train()
        step(other, other_optimizer, seed + 100)
    assert losses == alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_rule_7_saved_state_is_plain(backend, tmp_path):
    """Write original names and dtypes to a safetensors file for stock models; resume bitwise."""
    model, optimizer = fp8_backends.prepare(*made(), backend)
    for seed in range(3):
        step(model, optimizer, seed)
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    stock, _ = made()
    assert list(stock.state_dict()) == list(model.state_dict())
    assert not any(type(tensor) is not torch.Tensor for tensor in model.state_dict().values())
    safetensors.torch.load_model(stock, str(tmp_path / "model.safetensors"))
    resumed, resumed_optimizer = fp8_backends.prepare(
        stock,
        torch.optim.AdamW([p for p in stock.parameters() if p.requires_grad], lr=0.01),
        backend,
    )
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ((_, root, prepared),) = prepared_roots(model)
    ((_, resumed_root, resumed_prepared),) = prepared_roots(resumed)
    resumed_prepared.compute.load_scaling_state(resumed_root, prepared.compute.scaling_state(root))
    assert [step(model, optimizer, s) for s in (3, 4)] == [
        step(resumed, resumed_optimizer, s) for s in (3, 4)
    ]


def test_rule_8_only_official_extension_points_and_one_patch():
    """The import changes one attribute of Accelerate and none of PyTorch's classes."""
    script = """
        import accelerate, accelerate.state, accelerate.utils, torch
        places = {
            "Accelerator": accelerate.Accelerator, "accelerate.state": accelerate.state, "utils": accelerate.utils,
            "Module": torch.nn.Module, "Linear": torch.nn.Linear, "Optimizer": torch.optim.Optimizer,
            "AdamW": torch.optim.AdamW, "Tensor": torch.Tensor, "functional": torch.nn.functional,
        }
        before = {name: dict(vars(place)) for name, place in places.items()}
        import fp8_backends
        fp8_backends.prepare(torch.nn.Linear(16, 16), None, "native")
        for name, place in places.items():
            for key, value in vars(place).items():
                if before[name].get(key) is not value and key != "__annotations__":
                    print(name, key)
    """
    done = warm_process.run("-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["Accelerator __init__"]
