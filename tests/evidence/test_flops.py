"""Count the share of FP8 over all products with weights of a training step, like PyTorch's
counter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fp8_backends
from fp8_backends.convert.conversion import prepared_roots
from fp8_backends.convert.first_step import WorkMeter
from fp8_backends.convert.weight_products import find_weight_products

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import architectures  # noqa: E402


def prepared(model, spec="native:dynamic"):
    return fp8_backends.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), spec)


def step(model, optimizer, *inputs):
    model(*inputs).square().mean().backward()
    optimizer.step()


def trained(model, *inputs, spec="native:dynamic"):
    step(*prepared(model, spec), *inputs)
    return fp8_backends.audit(model)


def proof_of(model):
    ((_, _, prepared),) = prepared_roots(model)
    return prepared.observed.proof


def counted_flops(model, *inputs):
    with FlopCounterMode(display=False) as counter:
        model(*inputs).square().mean().backward()
    model.zero_grad()
    return counter.get_total_flops()


def flops_of_linears(*sizes):
    """Sum fprop, dgrad and wgrad, for (rows, in, out) each."""
    return sum(6 * rows * n_in * n_out for rows, n_in, n_out in sizes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_the_share_equals_pytorchs_counter(name):
    model = architectures.build(name)
    model, optimizer = prepared(model)
    architectures.loss_of(model, architectures.batch(name)).backward()
    optimizer.step()
    audit = fp8_backends.audit(model)
    assert audit.flops_share == pytest.approx(
        architectures.flops_share(name, audit.products), rel=1e-3
    )
    assert not audit.uncounted


def test_convolutions_of_every_form_count():
    model = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1),
        nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False),
        nn.ConvTranspose2d(16, 32, 2, stride=2),
        nn.Flatten(2),
        nn.Conv1d(32, 16, 3, dilation=2),
        nn.Flatten(),
        nn.Linear(16 * 60, 16),
    )
    x = torch.randn(2, 4, 8, 8)
    total = counted_flops(model, x)
    audit = trained(model, x)
    assert audit.flops_share == pytest.approx(flops_of_linears((2, 16 * 60, 16)) / total)
    assert proof_of(model).flops.share == audit.flops_share
    assert proof_of(model).layers == {"Linear": 1}
    assert proof_of(model).of == {"Linear": 1, "convolution": 4}
    assert audit.high_precision["0"] == "convolution: FP8 has no product for it"


def test_grouped_convolution_counts_its_own_channels():
    """PyTorch's counter ignores groups in the gradients of a convolution."""
    model = nn.Sequential(
        nn.Conv1d(16, 32, 3, groups=4), nn.ConvTranspose1d(32, 8, 2, stride=2, groups=8)
    )
    meter = WorkMeter(model, find_weight_products(model))
    assert model(torch.randn(5, 16, 12)).shape == (5, 8, 20)
    assert meter.work["0"].flops == 2 * 5 * 10 * model[0].weight.numel()
    assert meter.work["1"].flops == 2 * 5 * 10 * model[1].weight.numel()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.last = nn.Bilinear(16, 8, 32), nn.Linear(32, 16)

    def forward(self, x, y):
        return self.last(self.mix(x, y))


def test_bilinear_counts_both_inputs():
    audit = trained(Pair(), torch.randn(24, 16), torch.randn(24, 8))
    # neither input of the first layer needs a gradient
    assert audit.flops_share == pytest.approx(3 * 32 * 16 / (3 * 32 * 16 + 2 * 16 * 8 * 32))


class Rows(nn.Module):
    """Give layers different numbers of rows, use one twice, and ignore the result of one."""

    def __init__(self):
        super().__init__()
        self.all, self.twice, self.one = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.idle = nn.Linear(32, 64)

    def forward(self, x):
        x = self.twice(self.twice(self.all(x)))
        self.idle(x[:, 0])
        return self.one(x[:, 0])


class Spare(nn.Module):
    """Leave one layer uncalled, and multiply by another's weight in a function."""

    def __init__(self):
        super().__init__()
        self.spare, self.around, self.last = nn.Linear(16, 64), nn.Linear(16, 32), nn.Linear(32, 16)
        self.spare_convolution = nn.Conv1d(16, 64, 3)

    def forward(self, x):
        return self.last(nn.functional.linear(x, self.around.weight))


def test_an_idle_layer_does_not_count():
    audit = trained(
        Spare(),
        torch.randn(8, 16, requires_grad=True),
        spec={"backend": "native", "exclude": ["around"]},
    )
    assert audit.flops_share == pytest.approx(1 / 2) and not audit.uncounted


def test_peft_copy_replaces_the_original_in_the_count():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    config = peft.LoraConfig(r=4, target_modules=["0"], modules_to_save=["1"])
    audit = trained(peft.get_peft_model(model, config), torch.randn(8, 16))
    # the frozen layer's forward; its adapter is in high precision; the copy makes all three
    low, adapter = 16 * 32 + 3 * 32 * 16, 2 * 16 * 4 + 3 * 4 * 32
    assert audit.flops_share == pytest.approx(low / (low + adapter))


@pytest.mark.parametrize("spec", ["native:dynamic", "ao:tensorwise"])
@pytest.mark.filterwarnings("ignore:.*")
def test_each_layer_counts_its_rows(spec):
    audit = trained(
        Rows(),
        torch.randn(4, 8, 16, requires_grad=True),
        spec={"backend": spec, "exclude": ["one"]},
    )
    in_fp8 = flops_of_linears((32, 16, 32), (64, 32, 32)) + 2 * 4 * 32 * 64
    assert audit.flops_share == pytest.approx(in_fp8 / (in_fp8 + flops_of_linears((4, 32, 16))))


class Frozen(nn.Module):
    """Put a tower without gradients before trainable layers."""

    def __init__(self):
        super().__init__()
        self.tower, self.last = nn.Linear(16, 32).requires_grad_(False), nn.Linear(32, 16)

    def forward(self, x):
        with torch.no_grad():
            x = self.tower(x)
        return self.last(x)


def test_frozen_tower_counts_only_its_forward():
    audit = trained(Frozen(), torch.randn(8, 16), spec={"backend": "native", "exclude": ["tower"]})
    assert audit.flops_share == pytest.approx(2 * 32 * 16 / (2 * 32 * 16 + 16 * 32))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_forwards_count_once(use_reentrant):
    layers = nn.Sequential(nn.Linear(16, 32), nn.Conv1d(8, 8, 1), nn.Linear(32, 16))
    x = torch.randn(2, 8, 16, requires_grad=True)
    total = counted_flops(layers, x)
    model = nn.Sequential(layers)
    model.forward = lambda x: checkpoint(layers, x, use_reentrant=use_reentrant)
    assert trained(model, x).flops_share == pytest.approx(
        flops_of_linears((16, 16, 32), (16, 32, 16)) / total
    )


def test_layers_count_all_their_weights():
    recurrent, attention = nn.LSTM(16, 32, num_layers=2), nn.MultiheadAttention(32, 4)
    model = nn.ModuleList([recurrent, attention])
    found = find_weight_products(model)
    meter = WorkMeter(model, found)
    hidden, _ = recurrent(torch.randn(10, 4, 16))
    attention(hidden, torch.randn(20, 4, 32), torch.randn(20, 4, 32))
    meter.detach()
    work = {name: seen.flops for name, seen in meter.work.items()}
    gates = {"weight_ih_l0": 16, "weight_hh_l0": 32, "weight_ih_l1": 32, "weight_hh_l1": 32}
    assert work == {
        **{f"0.{name}": 2 * 40 * size * 128 for name, size in gates.items()},
        # one part each for queries, keys and values
        "1.in_proj_weight": 2 * 32 * 32 * (40 + 80 + 80),
    }


class Recurrent(nn.Module):
    """Classify sequences by the last hidden state, or by all states of packed sequences."""

    def __init__(self, packed):
        super().__init__()
        self.packed, self.lstm, self.last = packed, nn.LSTM(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(x, torch.full((4,), 10))
            return self.last(self.lstm(x)[0].data)
        return self.last(self.lstm(x)[1][0][0])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "hidden state"])
def test_recurrent_layers_count_for_any_inputs_and_outputs(packed):
    audit = trained(Recurrent(packed), torch.randn(10, 4, 16))
    in_fp8 = flops_of_linears((40 if packed else 4, 32, 16))
    # the first weight's input needs no gradient
    assert audit.flops_share == pytest.approx(in_fp8 / (in_fp8 + 40 * (4 * 16 + 6 * 32) * 128))


def test_attention_with_separate_key_and_value_sizes_counts_rows():
    model = nn.MultiheadAttention(32, 4, kdim=16, vdim=16)
    meter = WorkMeter(model, find_weight_products(model))
    model(torch.randn(10, 4, 32), torch.randn(20, 4, 16), torch.randn(20, 4, 16))
    assert {name: seen.rows for name, seen in meter.work.items()} == {
        "q_proj_weight": 40,
        "k_proj_weight": 80,
        "v_proj_weight": 80,
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_measured_layer_accepts_nested_tensors():
    model = nn.Linear(16, 32)
    meter = WorkMeter(model, find_weight_products(model))
    model(torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)]))
    assert meter.work[""].rows == 8


def test_lazy_layer_counts_once_initialized():
    model = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model[1].parameters())
    fp8_backends.prepare(model, optimizer, "native:dynamic")
    step(model, optimizer, torch.randn(4, 64))
    sizes = 64 * 32, 32 * 16
    assert fp8_backends.audit(model).flops_share == pytest.approx(sizes[1] / sum(sizes))


def test_forwards_without_training_do_not_count():
    """Generate text between the microbatches, and raise in a forward."""
    model, optimizer = prepared(Rows(), {"backend": "native", "exclude": ["one"]})
    x = torch.randn(4, 8, 16, requires_grad=True)
    failing = model.one.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    failing.remove()
    for _ in range(2):
        loss = model(x).square().mean()
        with torch.no_grad():
            model(x[:, :1])
        loss.backward()
    optimizer.step()
    in_fp8 = flops_of_linears((32, 16, 32), (64, 32, 32)) + 2 * 4 * 32 * 64
    assert fp8_backends.audit(model).flops_share == pytest.approx(
        in_fp8 / (in_fp8 + flops_of_linears((4, 32, 16)))
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_traced_forward_does_not_count():
    model = nn.Linear(16, 32)
    meter = WorkMeter(model, find_weight_products(model))
    torch.jit.trace(model, torch.randn(8, 16), check_trace=False)
    assert not meter.work


def test_a_replica_of_data_parallel_is_not_measured():
    """PyTorch makes one per GPU and forward, with the model's dictionaries of hooks."""
    model, optimizer = prepared(nn.Sequential(nn.Linear(16, 16)))
    # its layers are the model's, without copies for GPUs
    replica = model._replicate_for_data_parallel()
    replica(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    assert fp8_backends.audit(model).flops_share == 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_compiled_convolutions_are_named_as_not_counted():
    model, optimizer = prepared(
        nn.Sequential(nn.Conv1d(8, 8, 1), nn.Linear(16, 32), nn.Linear(32, 16))
    )
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        step(compiled, optimizer, torch.randn(4, 8, 16))
    assert fp8_backends.audit(model).uncounted == ["0"]
    found = proof_of(model)
    assert found.layers == {"Linear": 2} and found.of == {"Linear": 2, "convolution": 1}
    assert found.flops.share == 1 and "1 convolution not counted" in found.notes


def test_compiled_part_counts_like_eager_one():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    fp8_backends.prepare(model[0], optimizer, {"backend": "native", "exclude": ["0"]})
    fp8_backends.prepare(model[1], optimizer, "native:dynamic")
    model[0].compile(backend="eager")
    for _ in range(2):
        step(model, optimizer, torch.randn(16, 32, requires_grad=True))
    assert fp8_backends.audit(model).flops_share == pytest.approx(3 / 4)


# layers added after `prepare`


def test_added_layer_counts_at_once_and_warns_at_next_step(caplog):
    model, optimizer = prepared(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))
    x = torch.randn(8, 16, requires_grad=True)
    step(model, optimizer, x)
    assert fp8_backends.audit(model).flops_share == 1 and not caplog.text
    model.append(nn.Linear(16, 64))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    audit = fp8_backends.audit(model)
    assert audit.flops_share == pytest.approx(0.5)
    assert "added after the model was prepared" in audit.high_precision["2"]
    step(model, optimizer, x)
    assert "native:dynamic: 2: added after the model was prepared: prepare it again" in caplog.text
    caplog.clear()
    step(model, optimizer, x)
    fp8_backends.prepare(model, optimizer, "native:dynamic")
    step(model, optimizer, x)
    assert fp8_backends.audit(model).flops_share == 1 and not caplog.text


@pytest.mark.parametrize("backend", ["native:dynamic", "msamp:O2"])
def test_added_parameters_without_optimizer_warn_once(backend, caplog):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16))
    # none of 2.weight, as the user wishes
    optimizers = [torch.optim.AdamW(model[i].parameters()) for i in (0, 1)]
    for optimizer in optimizers:
        fp8_backends.prepare(model, optimizer, backend)
    model[1] = nn.Linear(32, 32)
    model.append(nn.Linear(16, 16, bias=False).requires_grad_(False))
    step(model, optimizers[0], torch.randn(8, 16))
    assert (
        f"{backend}: 1.bias, 1.weight: added after the model was prepared, in no prepared optimizer"
        in caplog.text
    )
    assert "2.weight" not in caplog.text and "3.weight" not in caplog.text
    caplog.clear()
    step(model, optimizers[0], torch.randn(8, 16))
    assert not caplog.text


@pytest.mark.parametrize(
    ("change", "backend"),
    [
        ("in no optimizer", "native:dynamic"),
        ("in the optimizer", "msamp:O1"),
        ("in no optimizer", "msamp:O3"),
        ("frozen", "msamp:O3"),
    ],
)
def test_a_replaced_parameter_is_named_once(change, backend, caplog):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    fp8_backends.prepare(model, optimizer, backend)
    x = torch.randn(8, 16)
    step(model, optimizer, x)
    assert not caplog.text
    model[1].weight = nn.Parameter(torch.randn(16, 32), requires_grad=change != "frozen")
    if change == "in the optimizer":
        optimizer.add_param_group({"params": [model[1].weight]})
    step(model, optimizer, x)
    plain = f"{backend}: 1.weight: replaced after the model was prepared, and plain: prepare model and optimizer again"
    assert (plain in caplog.text) == (backend != "native:dynamic")
    untrained = f"{backend}: 1.weight: added after the model was prepared, in no prepared optimizer"
    assert (untrained in caplog.text) == (change == "in no optimizer")
    caplog.clear()
    step(model, optimizer, x)
    assert not caplog.text
    fp8_backends.prepare(model, torch.optim.AdamW(model.parameters()), backend)
    assert (type(model[1].weight) is nn.Parameter) == (backend == "native:dynamic")


def test_a_parametrized_weight_of_a_level_steps(caplog):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    fp8_backends.prepare(model, optimizer, "msamp:O2")
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    step(model, optimizer, torch.randn(8, 16))
    assert "replaced" not in caplog.text


def test_replaced_layer_is_detected(caplog):
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32))
    model.head = nn.Linear(32, 16)
    model, optimizer = prepared(model, {"backend": "native", "exclude": ["1"]})
    model[0] = nn.Linear(16, 32)
    model[1] = nn.Linear(32, 32)
    optimizer.add_param_group({"params": [*model[0].parameters(), *model[1].parameters()]})
    model.forward = lambda x: model.head(model[1](model[0](x)))
    with pytest.raises(fp8_backends.FP8BackendError, match="no FP8 product ran"):
        step(model, optimizer, torch.randn(8, 16))
    reasons = fp8_backends.audit(model).high_precision
    assert "added after" in reasons["0"] and reasons["1"] == "left out by exclude='1'"
