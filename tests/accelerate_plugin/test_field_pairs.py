"""Every night, pairs of fields that have not met yet: each case is trained six steps beside plain
PyTorch, saved after
three, resumed to the bit, and restored to plain. To repeat a night::

    FIELD_PAIRS_SEED=739583 python -m pytest tests/accelerate_plugin/test_field_pairs.py -m nightly
"""

from __future__ import annotations

import datetime
import itertools
import os
import random
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate_state import fresh_accelerate
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fp8_backends
from fp8_backends.errors import FP8BackendError, RecipeError

__all__ = ["fresh_accelerate"]
SECONDS = float(os.environ.get("FIELD_PAIRS_SECONDS", 60))
STEPS, SAVED_AT = 6, 3
LEVELS = ("msamp:O1", "msamp:O2", "msamp:O3", "msamp:O4")
RUN = {
    "optimizer": ("AdamW", "SGD", "Muon and AdamW"),
    "accumulation": (1, 2),
    "checkpointing": (None, False, True),
    "clipping": (False, True),
    "frozen": (False, True),
}
"""Settings of a run that are no fields; the first is the default."""
FIELDS = {
    "backend": (
        *(
            "native:dynamic",
            "native:delayed",
            "native:window",
            "native:rowwise",
            "native:blockwise",
            "native:mxfp8",
        ),
        *("ao:tensorwise", "ao:rowwise", "ao:rowwise_with_gw_hp", *LEVELS),
    ),
    "include": (None, ["+lm_head"], ["*.q_proj", "*.down_proj"]),
    "exclude": (None, ["*.up_proj"]),
    "layers": (
        None,
        {"*.down_proj": "native:rowwise"},
        {"*.down_proj": "bf16"},
        {"*.q_proj": "native:mxfp8"},
    ),
    "schedule": (
        None,
        {2: "bf16"},
        {0: "bf16", 2: "native:dynamic"},
        {2: "native:rowwise", 4: "native:dynamic"},
    ),
    "saved_activations": (None, "fp8", "fp8+attention"),
    "fused_head": (None, True),
    "monitor_every": (None, 2),
    "guard": (None, "warn", "skip", "stop"),
    "products": (None, {"wgrad": "bf16"}, {"dgrad": "e4m3"}),
    "fast_accumulation": (None, False, "*.q_proj"),
    "use_autocast_during_eval": (None, True),
    "fp8_format": (None, "E4M3"),
    "margin": (None, 1),
    "amax_compute_algo": (None, "most_recent"),
    "override_linear_precision": (None, (False, False, True)),
    "fp8_params": (None, True),
    "pad_inner_dim": (None, True),
    "rounding": (None, "nearest"),
    "shard_states": (None, False),
    "gradient_release": (None, True),
    "autocast_dtype": (None, "bf16", "fp32"),
}
AXES = RUN | FIELDS
Case = dict[str, object]


def fields_of(case: Case) -> dict[str, object]:
    return {name: value for name, value in case.items() if name in FIELDS and value is not None}


def pairs_of(case: Case) -> set[tuple]:
    return set(itertools.combinations([(name, repr(case[name])) for name in AXES], 2))


def is_accepted(case: Case) -> bool:
    try:
        fp8_backends.resolve(fields_of(case))
    except FP8BackendError:
        return False
    return True


def cases(draw: random.Random):
    """Yield cases, each with a pair that none had before and otherwise few fields, as long as
    `resolve` accepts any."""
    waiting = [
        ((first, a), (second, b))
        for first, second in itertools.combinations(AXES, 2)
        for a, b in itertools.product(AXES[first], AXES[second])
    ]
    draw.shuffle(waiting)
    covered: set[tuple] = set()
    for pair in waiting:
        if tuple((name, repr(value)) for name, value in pair) in covered:
            continue
        drawn = []
        for _ in range(8):
            case = {
                name: values[0] if draw.random() < 0.6 else draw.choice(values)
                for name, values in AXES.items()
            }
            case |= {"backend": draw.choice(FIELDS["backend"]), **dict(pair)}
            # which takes no weights that train
            case["frozen"] = case["frozen"] or case["fp8_params"] is True
            if is_accepted(case):
                drawn.append(case)
        if drawn:
            chosen = max(drawn, key=lambda case: len(pairs_of(case) - covered))
            covered |= pairs_of(chosen)
            yield chosen


def network(case: Case) -> nn.Module:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
    if case["checkpointing"] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case["checkpointing"]})
        model.enable_input_require_grads()
    if case["frozen"]:
        model.model.layers.requires_grad_(False)
    return model


def optimizers_of(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if case["optimizer"] == "SGD":
        return [torch.optim.SGD(parameters, 1e-1, momentum=0.9)]
    hidden = [p for p in model.model.layers.parameters() if p.dim() == 2 and p.requires_grad]
    if case["optimizer"] == "AdamW" or not hidden:
        return [torch.optim.AdamW(parameters, 3e-3)]
    rest = [p for p in parameters if all(p is not other for other in hidden)]
    return [torch.optim.Muon(hidden, 3e-3), torch.optim.AdamW(rest, 3e-3)]


class Run:
    """The training of a case under an Accelerator of its own."""

    def __init__(self, case: Case, folder: Path, in_fp8: bool = True) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        fields = fields_of(case) | {"monitor_file": folder / "monitor.jsonl"}
        options = {
            "mixed_precision": "fp8",
            "kwargs_handlers": [fp8_backends.FP8RecipeKwargs(**fields)],
        }
        self.case, self.model = case, network(case)
        optimizers = optimizers_of(case, self.model)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=case["accumulation"],
            **(options if in_fp8 else {}),
        )
        self.model, *self.optimizers = self.accelerator.prepare(self.model, *optimizers)

    def losses(self, first: int, last: int) -> list[float]:
        losses = []
        for _ in range(first * self.case["accumulation"], last * self.case["accumulation"]):
            tokens = torch.arange(64).view(4, 16)
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=tokens, labels=tokens).loss
                self.accelerator.backward(loss)
                if self.case["clipping"] and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def check(case: Case, folder: Path) -> None:
    plain = Run(case, folder, in_fp8=False).losses(0, STEPS)
    run = Run(case, folder)
    losses = run.losses(0, SAVED_AT)
    run.accelerator.save_state(str(folder / "saved"))
    rest = run.losses(SAVED_AT, STEPS)
    assert (losses + rest)[-1] < losses[0]
    assert abs(rest[-1] - plain[-1]) < 0.03 * plain[-1], ("beside plain", rest, plain)
    resumed = Run(case, folder)
    resumed.accelerator.load_state(str(folder / "saved"))
    assert resumed.losses(SAVED_AT, STEPS) == rest, "resumed"
    values, again = run.values(), resumed.values()
    assert all(torch.equal(value, again[name]) for name, value in values.items()), "resumed weights"
    fp8_backends.restore(run.model)
    assert all(type(p) is nn.Parameter for p in run.model.parameters()), "restored"
    assert all(
        torch.equal(value, values[name]) for name, value in run.model.state_dict().items()
    ), "restored weights"


def outcome(case: Case, folder: Path) -> str:
    """Return `trained`, `refused`, or the fault."""
    try:
        check(case, folder)
    except RecipeError as error:
        named = any(name in str(error) for name, value in case.items() if value)
        return "refused" if named else f"unclear refusal: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.nightly
def test_pairs_of_fields_train_resume_and_restore(tmp_path):
    seed = int(os.environ.get("FIELD_PAIRS_SEED", datetime.date.today().toordinal()))
    began, outcomes = time.monotonic(), []
    for number, case in enumerate(cases(random.Random(seed))):
        if time.monotonic() - began > SECONDS:
            break
        (folder := tmp_path / str(number)).mkdir()
        changed = {
            name: value
            for name, value in case.items()
            if value != AXES[name][0] or name == "backend"
        }
        outcomes.append((outcome(case, folder), changed))
    faults = [pair for pair in outcomes if pair[0] not in ("trained", "refused")]
    assert not faults, f"seed {seed}:\n" + "\n".join(
        f"{changed}: {fault[:500]}" for fault, changed in faults
    )
    assert sum(name == "trained" for name, _ in outcomes) >= 3, outcomes
