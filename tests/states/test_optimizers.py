"""Converted optimizers of every kind: stock's numbers, states in the formats of a level,
checkpoints and refusals."""

import copy
import io
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hypothesis import given, settings
from hypothesis import strategies as st
from level_steps import (
    OPTIMIZERS,
    assert_equal_states,
    assert_rounded,
    loss_of,
    mlp,
    parameters_of,
    train,
)
from torch import nn

import fp8_backends
from fp8_backends.errors import FP8BackendError
from fp8_backends.formats.formats import E4M11, FORMATS
from fp8_backends.states import stock_steps
from fp8_backends.tensors.scaled_tensor import ScaledTensor


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675: a third-party
    optimizer."""

    fp8_roles = {"exp_avg": "first_moment"}

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                exp_avg = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"]).sub_(
                    lr * exp_avg.lerp(p.grad, 1 - beta1).sign()
                )
                exp_avg.lerp_(p.grad, 1 - beta2)


def matrices(parameters) -> list[torch.Tensor]:
    return [p for p in parameters if p.dim() == 2]


MAKE = {
    "adamw": lambda p: torch.optim.AdamW(  # two groups
        [
            {"params": list(p)[::2], "lr": 3e-3, "weight_decay": 0.1},
            {"params": list(p)[1::2], "betas": (0.8, 0.99)},
        ]
    ),
    "adam": OPTIMIZERS["adam"],
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.3, weight_decay=1e-2),
    "sgd without momentum": lambda p: torch.optim.SGD(p, 0.3),
    "muon": lambda p: torch.optim.Muon(matrices(p), 0.02),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.02, weight_decay=0.1),
    "lion": lambda p: Lion(p, 2e-3, weight_decay=0.1),
}

LEVELS = ("O2", "O3", "O4", "O1")
CASES = [*zip(MAKE, 2 * LEVELS, strict=False), *(("adamw", level) for level in LEVELS[1:])]
"""Each kind at a level, and AdamW at all of them."""


def prepared(kind: str, level: str, model: nn.Module | None = None, **fields) -> tuple:
    model = model or mlp()
    return fp8_backends.prepare(
        model, MAKE[kind](list(model.parameters())), {"backend": f"msamp:{level}", **fields}
    )


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.exact(torch.float32) if isinstance(tensor, ScaledTensor) else tensor.detach().clone()
    )


# The stock class's numbers


class Layers(nn.Module):
    """Two stored matrices, an embedding with scaled states, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48, bias=False)
        self.embed = nn.Parameter(torch.randn(70, 64).t())  # not contiguous


def stock_of(
    optimizer: torch.optim.Optimizer,
) -> tuple[torch.optim.Optimizer, dict[int, torch.Tensor]]:
    """Return a stock optimizer with FP32 copies of weights, gradients and states; and the copies by
    id."""
    copies = {id(p): exact(p) for p in parameters_of(optimizer)}
    groups = [
        {**group, "params": [copies[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    reference = optimizer.fp8_declared.stock(groups)
    for p in parameters_of(optimizer):
        copies[id(p)].grad = exact(p.grad)
        state = optimizer.state.get(p, {})
        if state:
            reference.state[copies[id(p)]] = {k: exact(v) for k, v in state.items()}
    return reference, copies


def assert_within_a_step(stored: torch.Tensor, wanted: torch.Tensor, rounding: str) -> None:
    """Stored within one step of its format (to nearest: half a step) of the FP32 numbers; equal in
    FP32."""
    if not isinstance(stored, ScaledTensor):
        torch.testing.assert_close(stored.detach(), wanted, rtol=1e-6, atol=1e-8)
        return
    fmt, scale_inv = (
        FORMATS[stored.codes.dtype] if stored.residual is None else E4M11,
        stored.scale_inv,
    )
    if stored.block_size:
        scale_inv = scale_inv.repeat_interleave(stored.block_size)[: stored.numel()].view(
            stored.shape
        )
    step = torch.maximum(
        2.0 ** (wanted.abs().log2().floor() - fmt.mantissa_bits), fmt.smallest * scale_inv
    )
    difference = (exact(stored) - wanted).abs()
    assert (difference <= step * (0.501 if rounding == "nearest" else 1.001)).all()


options = {
    "sgd": st.builds(
        lambda **drawn: drawn | {"nesterov": drawn["momentum"] > 0 and drawn["dampening"] == 0},
        momentum=st.sampled_from([0.0, 0.5, 0.95]),
        dampening=st.sampled_from([0.0, 0.4]),
        weight_decay=st.sampled_from([0.0, 0.1]),
        maximize=st.booleans(),
    ),
    "muon": st.fixed_dictionaries(
        {
            "nesterov": st.booleans(),
            "ns_steps": st.integers(1, 5),
            "adjust_lr_fn": st.sampled_from([None, "match_rms_adamw"]),
        }
    ),
    "adafactor": st.fixed_dictionaries(
        {
            "maximize": st.booleans(),
            "d": st.sampled_from([1.0, 2.0]),
            "weight_decay": st.sampled_from([0.0, 0.1]),
        }
    ),
}
CLASSES = {"sgd": torch.optim.SGD, "muon": torch.optim.Muon, "adafactor": torch.optim.Adafactor}


@pytest.mark.filterwarnings("ignore:.*no FP8 product ran")
@pytest.mark.parametrize("kind", CLASSES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_step_matches_stock_within_one_rounding(kind, data):
    level = data.draw(st.sampled_from(["O1", "O2", "O3", "O4"]))
    rounding = data.draw(st.sampled_from(["stochastic", "nearest"]))
    model = Layers()
    held = matrices(model.parameters()) if kind == "muon" else list(model.parameters())
    optimizer = CLASSES[kind](held, 0.03, **data.draw(options[kind]))
    fields = {"rounding": rounding, "on_unproven": "warn"}
    fp8_backends.prepare(model, optimizer, {"backend": f"msamp:{level}", **fields})
    for seed in range(3):
        for i, p in enumerate(held):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * seed + i))
        reference, copies = stock_of(optimizer)
        reference.step()
        optimizer.step()
        for p in held:
            wanted = copies[id(p)]
            assert_within_a_step(
                p.master if getattr(p, "master", None) is not None else p, wanted, rounding
            )
            for name, value in reference.state[wanted].items():
                if name != "step":
                    assert_within_a_step(optimizer.state[p][name], value, rounding)
            assert optimizer.state[p]["step"] == seed + 1


def weights_after_steps(kind: str, level: str) -> tuple:
    """Make three steps with some gradients missing. Return the values of all parameters, and the
    optimizer."""
    model = Layers()
    model, optimizer = prepared(kind, level, model, on_unproven="warn")
    for t in range(3):
        for i, p in enumerate(parameters_of(optimizer)):
            if (i + t) % 3:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + i))
        optimizer.step()
        optimizer.zero_grad()
    return [exact(p) for p in model.parameters()], optimizer


@pytest.mark.filterwarnings("ignore:.*no FP8 product ran")
@pytest.mark.parametrize(("kind", "level"), [("sgd", "O3"), ("lion", "O2"), ("lion", "O4")])
def test_shards_of_a_parameter_step_like_the_whole(kind, level, monkeypatch):
    weights, optimizer = weights_after_steps(kind, level)
    monkeypatch.setattr(stock_steps, "STEPPED_AT_ONCE", 1024)
    ours, its_optimizer = weights_after_steps(kind, level)
    assert all(map(torch.equal, ours, weights))
    assert_equal_states(its_optimizer, optimizer)


# States


ADAM = {"exp_avg": torch.float8_e4m3fn, "exp_avg_sq": torch.float16}
STORED = {
    "adamw": ADAM,
    "adam": ADAM,
    "sgd": {"momentum_buffer": torch.float8_e4m3fn},
    "sgd without momentum": {},
    "muon": {"momentum_buffer": torch.float16},
    "adafactor": {"row_var": torch.float32, "col_var": torch.float32},
    "lion": {"exp_avg": torch.float8_e4m3fn},
}
BYTES = {
    "sgd": 4,
    "sgd without momentum": 3,
    "muon": 5,
    "adafactor": 3 + 4 * (128 + 64) / (128 * 64),
    "lion": 4,
}
BYTES |= {"adamw": 6, "adam": 6}
"""Bytes of an element at O2: weight 2, gradient 1, and the states."""


@pytest.mark.parametrize("kind", MAKE)
def test_converted_object_keeps_groups_schedulers_and_hooks(kind):
    model, steps = mlp(), []
    optimizer = MAKE[kind](list(model.parameters()))
    optimizer.param_groups[0]["mine"] = "kept"
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    group, scheduler = (
        optimizer.param_groups[0],
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    )
    stock, lr = type(optimizer), group["lr"]
    assert fp8_backends.prepare(model, optimizer, "msamp:O2")[1] is optimizer
    assert isinstance(optimizer, stock) and optimizer.param_groups[0] is group
    for _ in range(2):
        train(model, optimizer, [0])
        scheduler.step()  # warns, an error here, if it does not see the step
    assert group["lr"] == lr / 4 and group["mine"] == "kept" and len(steps) == 2
    state = optimizer.state[model[0].weight]
    stored = {
        name: getattr(value, "codes", value).dtype
        for name, value in state.items()
        if name != "step"
    }
    assert stored == STORED[kind] and state["step"] == 2
    loss_of(model, 0).backward()
    audit = fp8_backends.audit(model, optimizer)
    assert audit.bytes_per_element["total"] == pytest.approx(BYTES[kind], rel=1e-3)
    assert (audit.lost_updates is None) is ("adam" not in kind)


def in_place(optimizer):
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def by_new_tensors(optimizer):
    for p, state in optimizer.state.items():
        for name, value in state.items():
            state[name] = torch.zeros_like(p.data if value.shape == p.shape else value)


def by_half_precision(optimizer):
    for state in optimizer.state.values():
        for name in state.keys() - {"step"}:
            state[name] = torch.zeros_like(state[name], dtype=torch.float16)
        state["step"].zero_()


@pytest.mark.parametrize(
    ("kind", "level"),
    [("adamw", "O2"), ("adamw", "O4"), ("sgd", "O3"), ("muon", "O1"), ("lion", "O4")],
)
def test_states_reset_by_users_return_to_their_format(kind, level):
    outcomes = []
    for reset in (in_place, by_new_tensors, by_half_precision):
        model, optimizer = prepared(kind, level)
        train(model, optimizer, range(2))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        bytes_before = fp8_backends.audit(model, optimizer).bytes_per_parameter
        reset(optimizer)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        losses = train(model, optimizer, range(2, 5))
        assert fp8_backends.audit(model, optimizer).bytes_per_parameter == bytes_before
        outcomes.append((losses, optimizer))
    for losses, optimizer in outcomes[1:]:
        assert losses == outcomes[0][0]
        assert_equal_states(optimizer, outcomes[0][1])


@pytest.mark.parametrize(("kind", "level"), CASES)
def test_resume_copies_and_pickles_match_bitwise(kind, level):
    dtype = torch.float32 if level == "O2" else torch.bfloat16
    model, optimizer = prepared(kind, level, mlp(dtype))
    train(model, optimizer, range(3))
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    buffer.seek(0)
    weights, states = torch.load(buffer, weights_only=True)
    other, resumed = prepared(kind, level, mlp(dtype, seed=3))
    other.load_state_dict(weights)
    resumed.load_state_dict(states)
    for a, b in zip(model.modules(), other.modules(), strict=True):
        if getattr(a, "fp8_scaling", None) is not None:
            b.fp8_scaling.copy_(a.fp8_scaling)
    for _, copied in (
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ):
        assert type(copied) is type(optimizer)
        assert_equal_states(optimizer, copied)
    assert train(model, optimizer, range(3, 6)) == train(other, resumed, range(3, 6))
    assert_equal_states(optimizer, resumed)


PAIRS = [("stock", "O2"), ("O3", "O1"), ("O2", "stock"), ("O1", "O3")]
ADAM_PAIRS = [
    ("stock", "O4"),
    ("O4", "stock"),
    ("O4", "O2"),
    ("O2", "O4"),
    ("O3", "O4"),
    ("O1", "O4"),
    ("O4", "O1"),
]


@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [
        *((kind, *pair) for kind, pair in zip(MAKE, 2 * PAIRS, strict=False)),
        *(("adamw", *pair) for pair in (*PAIRS[1:], *ADAM_PAIRS)),
    ],
)
def test_checkpoint_loads_by_value_at_another_level(kind, source, target):
    def made(level, seed):
        model = mlp(seed=seed)
        return (
            (model, MAKE[kind](list(model.parameters())))
            if level == "stock"
            else prepared(kind, level, model)
        )

    (model, optimizer), (other, loaded) = made(source, 0), made(target, 5)
    train(model, optimizer, range(3))
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(parameters_of(optimizer), parameters_of(loaded), strict=True):
        for name in STORED[kind].keys() & optimizer.state[p].keys():
            value, loaded_value = exact(optimizer.state[p][name]), loaded.state[q][name]
            scaled = isinstance(loaded_value, ScaledTensor)
            # half a step of E4M3 is 2**-4 of a value, and of a root 2**-5
            half_step = (
                (1 + 2**-5) ** 2 - 1
                if scaled and loaded_value.codes.dtype == torch.uint8
                else 2**-4
            )
            atol = value.abs().max().item() * 1e-5 * scaled
            torch.testing.assert_close(
                exact(loaded_value), value, rtol=half_step if scaled else 0, atol=atol
            )
        assert loaded.state[q].get("step", 3) == 3
    for name, value in model.state_dict().items():
        assert_rounded(other.state_dict()[name], value, "O1" if target == "stock" else target)
    losses = train(other, loaded, [9] * 8)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("kind", "name", "steps"), [("sgd", "momentum_buffer", 2), ("adamw", "exp_avg", 3)]
)
def test_prepare_keeps_states_of_stepped_optimizer(kind, name, steps):
    """SGD has not counted its steps: its buffer stands for one."""
    model = mlp()
    optimizer = MAKE[kind](model.parameters())
    train(model, optimizer, range(2))
    before = optimizer.state[model[0].weight][name].clone()
    fp8_backends.prepare(model, optimizer, "msamp:O2")
    torch.testing.assert_close(
        exact(optimizer.state[model[0].weight][name]), before, rtol=2**-4, atol=1e-6
    )
    train(model, optimizer, [2])
    assert optimizer.state[model[0].weight]["step"] == steps


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "level"), CASES)
def test_non_finite_gradient_counts_as_zero(kind, level):
    model, optimizer = prepared(kind, level)
    for step in range(12):
        loss_of(model, 0).backward()
        if step in (0, 5):
            for p in model.parameters():
                p.grad = torch.ones(p.shape)
                p.grad.view(-1)[3] = torch.inf if step else torch.nan
        optimizer.step()
        optimizer.zero_grad()
    states = [exact(v) for p in parameters_of(optimizer) for v in optimizer.state[p].values()]
    assert all(torch.isfinite(value).all() for value in [*states, *model.state_dict().values()])
    losses = train(model, optimizer, [0] * 10)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("rounding", "least", "most"), [("stochastic", 0.9, 1.1), ("nearest", 0.0, 0.1)]
)
def test_small_steps_accumulate_with_stochastic_rounding(rounding, least, most):
    """Steps of SGD of a fiftieth of FP16's own: to nearest, all are lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    nn.init.constant_(model[0].weight, 0.875)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    fp8_backends.prepare(
        model, optimizer, {"backend": "msamp:O2", "rounding": rounding, "on_unproven": "warn"}
    )
    with pytest.warns(UserWarning, match="no FP8 product ran"):
        for _ in range(40):
            model[0].weight.grad = torch.full((128, 128), 2.0**-11 / 50)
            optimizer.step()
    moved = (0.875 - exact(model[0].weight)).mean() / (40 * 2.0**-11 / 50)
    assert least <= moved <= most


# Refusals


def refused(states: dict, change) -> dict:
    states = copy.deepcopy(states)
    change(states)
    return states


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("sgd", lambda s: s["state"][0].pop("momentum_buffer"), "no momentum_buffer"),
        (
            "muon",
            lambda s: s["state"][0]["momentum_buffer"].view(-1)[:1].fill_(torch.nan),
            "momentum_buffer .* nan",
        ),
        (
            "adafactor",
            lambda s: s["state"][0]["row_var"].neg_(),
            "row_var of parameter 0 .* not negative",
        ),
        (
            "adafactor",
            lambda s: s["state"][0].update(col_var=torch.zeros(1, 63)),
            r"col_var .* shape \(1, 63\)",
        ),
        ("adafactor", lambda s: s["state"][0].pop("step"), "no step"),
        (
            "sgd",
            lambda s: s["param_groups"][0].update(momentum=torch.nan),
            "momentum of parameter group 0 holds nan",
        ),
        (
            "sgd",
            lambda s: s["param_groups"][0].update(nesterov="yes"),
            "nesterov .* must be True or False",
        ),
        (
            "muon",
            lambda s: s["param_groups"][0].update(ns_coefficients=(1.0,)),
            "ns_coefficients .* not 3 numbers",
        ),
        (
            "adafactor",
            lambda s: s["param_groups"][0].update(eps=(None, -torch.inf)),
            "eps of parameter group 0",
        ),
        (
            "lion",
            lambda s: s["param_groups"][0].update(betas=(0.9, torch.nan)),
            "betas of parameter group 0",
        ),
    ],
)
def test_untrainable_state_dict_is_refused(kind, change, message):
    model, optimizer = prepared(kind, "O2")
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(FP8BackendError, match=message):
        optimizer.load_state_dict(refused(before, change))
    optimizer.load_state_dict(before)


def test_wrong_fp8_roles_are_refused():
    wrong = type("Wrong", (Lion,), {"fp8_roles": {"exp_avg": "third_moment"}})
    model = mlp()
    with pytest.raises(
        FP8BackendError, match="'third_moment': there are first_moment, second_moment"
    ):
        fp8_backends.prepare(model, wrong(model.parameters()), "msamp:O2")
    silent = type("Silent", (Lion,), {"fp8_roles": {}})
    model, optimizer = fp8_backends.prepare(model, silent(model.parameters()), "msamp:O2")
    loss_of(model, 0).backward()
    with pytest.raises(FP8BackendError, match="Silent has a state 'exp_avg'.*not declared"):
        optimizer.step()


def count_in_group(optimizer):
    optimizer.param_groups[0]["k"] = optimizer.param_groups[0].get("k", 0) + 1


@pytest.mark.parametrize(
    ("write", "name"),
    [(lambda optimizer: setattr(optimizer, "t", optimizer.t + 1), "t"), (count_in_group, "k")],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_writes_outside_parameters_and_states_are_refused(write, name, level):
    """A step on copies would count each time from the same number."""

    class Counting(Lion):
        fp8_roles, t = Lion.fp8_roles, 0

        def step(self, closure=None):
            write(self)
            super().step(closure)

    model = mlp()
    optimizer = Counting(model.parameters())
    fp8_backends.prepare(model, optimizer, f"msamp:{level}")
    loss_of(model, 0).backward()
    with pytest.raises(FP8BackendError, match=f"Counting.step writes '{name}' of the optimizer"):
        optimizer.step()


def test_subclass_does_not_inherit_fp8_roles():
    model = mlp()
    said = "Other does not inherit fp8_roles.*: name them in fp8_roles of the class itself"
    with pytest.raises(FP8BackendError, match=said):
        fp8_backends.prepare(model, type("Other", (Lion,), {})(model.parameters()), "msamp:O2")


@pytest.mark.parametrize("level", ["msamp:O1", "msamp:O2"])
def test_an_argument_without_default_is_refused(level):
    class Needy(Lion):
        fp8_roles = Lion.fp8_roles

        def __init__(self, params, rate, *, warm, decay=0.0, **options):
            super().__init__(params, lr=rate, **options)

    model = mlp()
    with pytest.raises(FP8BackendError, match="Needy: .*'rate', and .*Give the argument a default"):
        fp8_backends.prepare(model, Needy(model.parameters(), 1e-3, warm=1), level)


# In training


def test_muon_with_adamw_accumulates_and_clips_under_accelerate():
    """Muon trains the matrices, AdamW the rest."""
    AcceleratorState._reset_state(True)
    recipe = fp8_backends.FP8RecipeKwargs(backend="msamp:O2")
    accelerator = Accelerator(
        mixed_precision="fp8", gradient_accumulation_steps=2, cpu=True, kwargs_handlers=[recipe]
    )
    model = mlp()
    muon, rest = MAKE["muon"](model.parameters()), [p for p in model.parameters() if p.dim() < 2]
    adam = torch.optim.AdamW(rest, 1e-2)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 4, gamma=0.5) for each in (muon, adam)]
    model, muon, adam, *schedulers = accelerator.prepare(model, muon, adam, *schedulers)
    losses = []
    for seed in range(24):
        with accelerator.accumulate(model):
            loss = loss_of(model, seed % 2)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for each in (muon, adam, *schedulers):
                each.step()
            for each in (muon, adam):
                each.zero_grad()
        losses.append(loss.item())
    matrix = accelerator.unwrap_model(model)[0].weight
    assert muon.optimizer.state[matrix]["step"] == 12 and losses[-1] < 0.6 * losses[0]
    assert [each.param_groups[0]["lr"] for each in (muon, adam)] == [0.02 / 8, 1e-2 / 8]
    AcceleratorState._reset_state(True)
