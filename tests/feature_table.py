"""List Accelerate's other features as working or refused with FP8. `tables.rst` shows them.

Each row has a run in `feature_runs.py`, or a command in
`accelerate_plugin/test_accelerate_features.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

BACKENDS = ("native:delayed", "ao:tensorwise", "msamp:O2", "msamp:O3")
"""One of each kind."""
LEVELS = ("msamp:O2", "msamp:O3")
NOBODY = MappingProxyType({})


def at(backends: tuple[str, ...], words: str) -> Mapping[str, str]:
    return dict.fromkeys(backends, words)


class Feature(NamedTuple):
    """Describe a row."""

    name: str
    run: str
    note: str = ""
    """Reason, and alternative."""
    refused: Mapping[str, str] = NOBODY
    """Backend -> part of the error."""
    refused_on_several: Mapping[str, str] = NOBODY
    """The same on several processes only."""

    def refusal(self, backend: str, processes: int) -> str | None:
        """Return the expected error; None for a working feature."""
        several = self.refused_on_several if processes > 1 else NOBODY
        return self.refused.get(backend, several.get(backend))

    def cell(self, backend: str) -> str:
        if backend in self.refused:
            return "refused"
        return "one process" if backend in self.refused_on_several else "works"


_HOOK = at(LEVELS, "leave the hook out")
_SHARED_OUT = at(("msamp:O3",), "shard_states=False")
_OPTIMIZER = at(LEVELS, "trains with torch.optim.AdamW, Adam, SGD, Muon or Adafactor, not with")
_OPTIMIZER_NOTE = (
    "Levels train with ``torch.optim``'s AdamW, Adam, SGD, Muon and Adafactor: use a backend of O0"
)
_AVERAGE_NOTE = (
    "Create it after ``prepare``. At levels, keep it in FP32: `Levels <levels.rst>`_ has code. At "
    "O3 under DDP no rank has all masters to average: prepare with ``shard_states=False``"
)
_STATE_DICT_NOTE = (
    "At O3 under DDP no rank has a whole state dict: prepare with ``shard_states=False``, or load "
    "files of ``Accelerator.save_model``"
)

_HOOK_NOTE = (
    "Gradients of scaled weights bypass DDP's hooks, in E4M3: leave the hook out. Hooks must be "
    "members of ``DDPCommunicationHookType``: Accelerate 1.15 ignores strings. BF16 and "
    "BATCHED_POWER_SGD are not tested: PyTorch has them only on GPUs"
)
_WHOLE_NOTE = (
    "At O3 under DDP each rank keeps all states from then on, with a line in the log; "
    "``shard_states=True`` refuses"
)
_PROFILE_NOTE = (
    "The proof of ``ao`` needs PyTorch's profiler, and waits for the end of yours, "
    "including its scheduled waits"
)

FEATURES = (
    Feature(
        "``LocalSGD``",
        "local_sgd",
        _WHOLE_NOTE,
    ),
    Feature("``comm_hook`` FP16", "comm_hook_fp16", _HOOK_NOTE, refused_on_several=_HOOK),
    Feature("``comm_hook`` POWER_SGD", "comm_hook_power_sgd", _HOOK_NOTE, refused_on_several=_HOOK),
    Feature("``join_uneven_inputs``", "join_uneven_inputs", _WHOLE_NOTE),
    Feature("``Join`` of PyTorch", "join", _WHOLE_NOTE),
    Feature("``trigger_sync_in_backward``", "trigger_sync"),
    Feature("``accumulate`` of several models", "accumulate_several"),
    Feature("``find_executable_batch_size``", "batch_size_finder"),
    Feature("``profile``", "profile", _PROFILE_NOTE),
    Feature("``profile`` by a schedule", "profile_by_schedule", _PROFILE_NOTE),
    Feature(
        "trackers",
        "trackers",
        "Their configuration includes ``fp8_backend`` and ``fp8_flops_share``",
    ),
    Feature("``set_trigger``, ``check_trigger``", "early_stopping"),
    Feature("schedule-free optimizers", "schedule_free", _OPTIMIZER_NOTE, refused=_OPTIMIZER),
    Feature(
        "8-bit optimizers",
        "eight_bit_optimizer",
        f"{_OPTIMIZER_NOTE}; the states of O2 and O3 are in 8 and 16 bits. Paged ones need a GPU, "
        f"and are not tested",
        refused=_OPTIMIZER,
    ),
    Feature(
        "LOMO",
        "lomo",
        f"{_OPTIMIZER_NOTE}. Under DDP LOMO steps before gradients are reduced, in bf16 and FP8: "
        f"train on one process",
        refused=_OPTIMIZER,
        refused_on_several=at(("native:delayed", "ao:tensorwise"), "train on one process"),
    ),
    Feature(
        "EMA (``AveragedModel``)",
        "ema",
        _AVERAGE_NOTE,
        refused_on_several=_SHARED_OUT,
    ),
    Feature(
        "SWA (``AveragedModel``)",
        "swa",
        _AVERAGE_NOTE,
        refused_on_several=_SHARED_OUT,
    ),
    Feature("``cpu_offload``", "offload_to_cpu", _STATE_DICT_NOTE, refused_on_several=_SHARED_OUT),
    Feature(
        "``disk_offload``", "offload_to_disk", _STATE_DICT_NOTE, refused_on_several=_SHARED_OUT
    ),
    Feature("``dispatch_model``", "dispatch", _STATE_DICT_NOTE, refused_on_several=_SHARED_OUT),
    Feature("``save_model`` in shards", "sharded_save"),
    Feature(
        "``load_checkpoint_in_model`` while training",
        "load_in_training",
        "At O3 under DDP use ``Accelerator.load_state``, or ``shard_states=False``",
        refused_on_several=_SHARED_OUT,
    ),
    Feature(
        "``load_checkpoint_and_dispatch``",
        "load_and_dispatch",
        "For an unprepared model, for inference",
    ),
    Feature(
        "the same, then ``prepare``",
        "load_then_prepare",
        "In this order: Accelerate misses the states of a model prepared without weights",
    ),
    Feature(
        "``init_empty_weights``, then ``prepare``",
        "empty_weights",
        "Then call ``to_empty`` and ``load_state_dict``",
    ),
    Feature(
        "``prepare_pippy``",
        "pippy",
        "First call ``accelerator.unwrap_model(model, keep_fp32_wrapper=False)``, and for ``ao`` "
        "and levels ``fp8_backends.restore(model)``. ``gather_output=True`` fails in Accelerate "
        "1.15 itself",
        refused_on_several=_SHARED_OUT,
    ),
    Feature(
        "``accelerate test``",
        "accelerate_test",
        "Start its script by ``fp8-backends launch``, with ``on_unproven: warn``, since its model "
        "has no Linear. It expects equal weights from one and several processes, so levels with "
        "their FP8 gradients need ``gradient_comm: plain``. ``fp8-backends doctor`` tests FP8 "
        "itself",
        refused_on_several=at(LEVELS, "Did not obtain the same model"),
    ),
    Feature(
        "``accelerate config``",
        "accelerate_config",
        "The wizard offers ``ao``, and ``te`` and ``msamp`` if these packages are installed: write "
        "any other backend into its file",
    ),
)


def cells() -> list[tuple[Feature, str]]:
    """Return all pairs of a feature and a backend."""
    return list(itertools.product(FEATURES, BACKENDS))


def in_turn(feature: Feature, backend: str, processes: int) -> bool:
    """Choose the cells of the default run: each feature works with one backend, and the backends
    take turns; a feature with refusals has one of each."""
    number = FEATURES.index(feature) + processes
    turn = BACKENDS[number % len(BACKENDS) :] + BACKENDS[: number % len(BACKENDS)]
    first = {feature.refusal(each, processes): each for each in reversed(turn)}
    return first[feature.refusal(backend, processes)] == backend


def notes() -> dict[str, int]:
    """Note -> its number below the table."""
    written = dict.fromkeys(feature.note for feature in FEATURES if feature.note)
    return {note: number for number, note in enumerate(written, 1)}
