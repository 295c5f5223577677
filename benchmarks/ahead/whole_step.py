"""A whole training step, added up from its parts: each line a number of seconds and where it is from."""

from __future__ import annotations

from typing import NamedTuple

import roofline
from machine import Chip
from machine_code import NOTHING, Work
from specs import PLAIN, TORCHAO

FUSED_ADAMW = 28.0
"""Bytes an element that PyTorch's fused AdamW over FP32 reads and writes: weight, gradient and two states read, all but
the gradient written."""


CAST_OF_A_GRADIENT = (4, 4 + 1)
"""Bytes an element of the passes that store the FP32 gradient of a scaled weight in E4M3: its amax, its codes."""
LAUNCHES_OF_A_NOTE = 2
"""Of `fp8_backends::note_backward`, an operator of compiled code: counts, and the amax of rules with a state."""


class Line(NamedTuple):
    what: str
    seconds: float
    source: str


def optimizer_seconds(parameters: int, of_an_element: dict | None, chip: Chip) -> float:
    """Of all parameters. of_an_element: what the kernels of a level cost; None: PyTorch's fused AdamW."""
    if of_an_element is None:
        return roofline.of_kernel(FUSED_ADAMW * parameters, NOTHING, chip)
    bytes_ = (of_an_element["read"] + of_an_element["written"]) * parameters
    work = Work(*(of_an_element[name] * parameters for name in Work._fields))
    return roofline.of_kernel(bytes_, work, chip)


def gradient_casts(elements: int, chip: Chip) -> float:
    """Of so many scaled weights' gradients, which a hook casts one by one."""
    return sum(roofline.of_kernel(size * elements, NOTHING, chip) for size in CAST_OF_A_GRADIENT)


def share_of_a_copy(of_an_element: dict, chip: Chip) -> float:
    """The bandwidth of the optimizer's kernels over that of a copy."""
    seconds = optimizer_seconds(1, of_an_element, chip)
    return (of_an_element["read"] + of_an_element["written"]) / chip.copy / seconds


def lines(traced: dict, layers: int, of_an_element: dict | None, chip: Chip) -> list[Line]:
    """traced: what `compiled_layers.py` prints."""
    layer, outside = traced["layer"]["seconds"], traced["outside"]["seconds"]
    scaled = traced.get("scaled", 0)  # which records that were made first do not tell
    casts = [Line("gradients' casts", gradient_casts(scaled, chip), "9 bytes an element of the layers' weights")]
    calls = layers * len(traced["layer"]["other_calls"])
    notes = [Line("notes of the layers", calls * LAUNCHES_OF_A_NOTE * roofline.of_bytes(0, chip), "their launches")]
    return [
        Line("products of the layers", layers * layer["products"], "operations over the assumed rates"),
        Line("attention", layers * layer["attention"], "operations over assumed shares of the bf16 rate"),
        Line("other kernels of the layers", layers * layer["kernels"], "Inductor's code: bytes and instructions"),
        Line("head's products", outside["products"], "operations over the measured bf16 rate, or FP8's"),
        Line("embedding, norm, loss", outside["kernels"], "bytes of PyTorch's operators"),
        Line(
            "optimizer",
            optimizer_seconds(traced["parameters"], of_an_element, chip),
            "28 bytes an element" if of_an_element is None else "its kernels' bytes and instructions",
        ),
        *(casts if scaled else []),
        *(notes if calls else []),
    ]


def ratios(seconds: dict[str, float], peaks: dict[str, float]) -> dict[str, float | None]:
    """What the targets ask for, from the seconds of a step and the peak bytes of each backend: of backends by their
    names alone, and of those with a fused head."""
    found = _ratios({name: each for name, each in seconds.items() if "?" not in name}, peaks)
    fused = {name: each for name, each in seconds.items() if "fused_head=True" in name}
    if fused:
        others = {name: each for name, each in seconds.items() if name in (PLAIN, TORCHAO)}
        found |= {f"{name}, with a fused head": each for name, each in _ratios(fused | others, peaks).items()}
    return found


def _ratios(seconds: dict[str, float], peaks: dict[str, float]) -> dict[str, float | None]:
    def faster(one: list[str], other: list[str]) -> float | None:
        mine, theirs = ([seconds[name] for name in names] for names in (one, other))
        return min(theirs) / min(mine) if mine and theirs else None

    native = [name for name in seconds if name.startswith("native")]
    ao = [name for name in seconds if name == TORCHAO or name.startswith("ao:tensorwise")]
    o2 = [name for name in seconds if name.startswith("msamp:O2")]
    plain = [name for name in seconds if name == PLAIN]
    peak = [peaks[name] for name in o2 if name in peaks]
    return {
        "native / bf16, tokens a second": faster(native, plain),
        "native / TorchAO, tokens a second": faster(native, ao),
        "msamp:O2 / native, tokens a second": faster(o2, native),
        "msamp:O2 / bf16, peak bytes, eager": peak[0] / peaks[PLAIN] if peak and PLAIN in peaks else None,
    }
