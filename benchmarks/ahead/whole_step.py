"""Sum a whole training step from its parts: each line is a number of seconds and its source."""

from __future__ import annotations

from typing import NamedTuple

import roofline
from machine import Chip
from machine_code import NOTHING, Work
from specs import PLAIN, TORCHAO

FUSED_ADAMW = 28.0
"""Bytes per element read and written by PyTorch's fused AdamW over FP32: weight, gradient and two
states read, all but the gradient written."""


CAST_OF_A_GRADIENT = (4, 4 + 1)
"""Bytes per element of the passes that store the FP32 gradient of a scaled weight in E4M3: its
amax, its codes."""
LAUNCHES_OF_A_NOTE = 2
"""Launches of `fp8_backends::note_backward`, an operator of compiled code: counts, and the amax of
rules with a state."""


class Line(NamedTuple):
    what: str
    seconds: float
    source: str


def optimizer_seconds(parameters: int, of_an_element: dict | None, chip: Chip) -> float:
    """Return the optimizer's seconds for parameters in one format. of_an_element: what the kernels
    of a level cost; None: PyTorch's fused AdamW, or a kernel that reads and writes the same
    FP32."""
    if of_an_element is None:
        return roofline.of_kernel(FUSED_ADAMW * parameters, NOTHING, chip)
    bytes_ = (of_an_element["read"] + of_an_element["written"]) * parameters
    work = Work(*(of_an_element[name] * parameters for name in Work._fields))
    return roofline.of_kernel(bytes_, work, chip)


def gradient_casts(elements: int, chip: Chip) -> float:
    """Return the seconds of a hook's casts of this many scaled weights' gradients, one by one."""
    return sum(roofline.of_kernel(size * elements, NOTHING, chip) for size in CAST_OF_A_GRADIENT)


def share_of_a_copy(of_an_element: dict, chip: Chip) -> float:
    """Return the bandwidth of the optimizer's kernels over a copy's."""
    seconds = optimizer_seconds(1, of_an_element, chip)
    return (of_an_element["read"] + of_an_element["written"]) / chip.copy / seconds


def lines(traced: dict, layers: int, of_an_element: dict | None, chip: Chip) -> list[Line]:
    """Return the lines of a step. traced: the output of `compiled_layers.py`."""
    layer, outside = traced["layer"]["seconds"], traced["outside"]["seconds"]
    scaled = traced.get("scaled", 0)  # missing in the oldest records
    casts = [
        Line(
            "gradients' casts",
            gradient_casts(scaled, chip),
            "9 bytes an element of the layers' weights",
        )
    ]
    stored = traced.get("stored", scaled) if of_an_element else 0
    optimizer = optimizer_seconds(traced["parameters"] - stored, None, chip)
    if of_an_element:
        optimizer += optimizer_seconds(stored, of_an_element, chip)
    calls = layers * len(traced["layer"]["other_calls"])
    notes = [
        Line(
            "notes of the layers",
            calls * LAUNCHES_OF_A_NOTE * roofline.of_bytes(0, chip),
            "their launches",
        )
    ]
    return [
        Line(
            "products of the layers",
            layers * layer["products"],
            "operations over rates measured by shape",
        ),
        Line("attention", layers * layer["attention"], "operations over assumed rates"),
        Line(
            "other kernels of the layers",
            layers * layer["kernels"],
            "Inductor's code: bytes and instructions",
        ),
        Line("head's products", outside["products"], "operations over rates measured by shape"),
        Line("embedding, norm, loss", outside["kernels"], "bytes of PyTorch's operators"),
        Line(
            "optimizer",
            optimizer,
            "28 bytes an element in FP32"
            + ("; its kernels' bytes and instructions" if of_an_element else ""),
        ),
        *(casts if scaled else []),
        *(notes if calls else []),
    ]


def ratios(seconds: dict[str, float], peaks: dict[str, float]) -> dict[str, float | None]:
    """Return the figures of the targets, from the seconds of a step and the peak bytes of each
    backend: plain backends, and backends with a fused head."""
    found = _ratios({name: each for name, each in seconds.items() if "?" not in name}, peaks)
    fused = {name: each for name, each in seconds.items() if "fused_head=True" in name}
    if fused:
        others = {name: each for name, each in seconds.items() if name in (PLAIN, TORCHAO)}
        found |= {
            f"{name}, with a fused head": each
            for name, each in _ratios(fused | others, peaks).items()
        }
    return found


def _ratios(seconds: dict[str, float], peaks: dict[str, float]) -> dict[str, float | None]:
    """Each rule of `native` by its name: TorchAO's rule is `dynamic`, and the window rule of O2 is
    nearer to `delayed`."""
    by_name = {name.partition("?")[0]: each for name, each in seconds.items()}

    def faster(one: str, other: str) -> float | None:
        return by_name[other] / by_name[one] if {one, other} <= by_name.keys() else None

    rules = [name for name in by_name if name.startswith("native")]
    found = {f"{rule} / bf16, tokens a second": faster(rule, PLAIN) for rule in rules}
    found |= {f"{rule} / TorchAO, tokens a second": faster(rule, TORCHAO) for rule in rules}
    found |= {f"msamp:O2 / {rule}, tokens a second": faster("msamp:O2", rule) for rule in rules}
    peak = next(
        (each for name, each in peaks.items() if name in seconds and name.startswith("msamp:O2")),
        None,
    )
    found["msamp:O2 / bf16, peak bytes, eager"] = (
        peak / peaks[PLAIN] if peak and PLAIN in peaks else None
    )
    return found
