"""Compare losses at 10.7 million parameters, paired by seed, weights and data: Llama, hidden 384, 6
layers, bytes of Python's sources, 2,048 tokens a step, AdamW with betas 0.9 and 0.95.

    scale_loss.py --json benchmarks/results/scale_loss_cpu_avx2.json --minutes 60
    scale_loss.py --json benchmarks/results/scale_loss_gpu.json --workers 14 --minutes 5
    scale_loss.py --json benchmarks/results/scale_loss_1000_gpu.json --steps 1000 --warmup-share 0.1
    --seeds 3

A record is extended by a run at a time, seed by seed over all variants: it can be stopped at any
moment, and continued on another day on the same chip. So small a model leaves a GPU idle:
`--workers` trains several runs side by side. `rows reversed` is the reference with each batch in
the reverse order, other sums of the same numbers. Gradient release drops each gradient inside
backward, so nothing can be clipped, and its reference is not clipped either. The learning rate
rises over half of 160 steps: after 16 steps of warm-up the losses are higher, and a pair differs
five times as much.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from measuring import Attempts, cpu_features, device, machine, options, plain
from tables import printed

from fp8_backends.tools.compare.summary import LOSS_GAP_BOUND, paired_gap
from fp8_backends.tools.compare.training_run import Run
from fp8_backends.tools.compare.workload import Settings, load_text

BETAS = 0.9, 0.95
REFERENCE, REVERSED, UNCLIPPED = "reference", "rows reversed", "reference, not clipped"


class Variant(NamedTuple):
    backend: str | None = None
    """None: the machine's fast precision, without FP8."""
    fields: dict = {}
    against: str = REFERENCE

    @property
    def clip(self) -> float:
        return math.inf if self.against == UNCLIPPED else 1.0


FURTHER = (
    "native:rowwise",
    "native:blockwise",
    "ao:tensorwise",
    "te:delayed",
    "te:dynamic",
    "msamp:O1",
    "msamp:O3",
)
"""Trained only if named."""
OF_BACKENDS = "native:dynamic", "native:delayed", "native:window", "msamp:O2", "msamp:O4", *FURTHER
VARIANTS = {
    REFERENCE: Variant(),
    REVERSED: Variant(),
    **{name: Variant(name) for name in OF_BACKENDS},
    "msamp:O4, FP8 activations": Variant("msamp:O4", {"saved_activations": "fp8"}),
    UNCLIPPED: Variant(against=UNCLIPPED),
    "msamp:O4, gradient release": Variant("msamp:O4", {"gradient_release": True}, UNCLIPPED),
}


def trained(name: str, seed: int, told: dict) -> dict:
    """Train one variant from one seed, and return its losses."""
    variant, reference, hidden = VARIANTS[name], told["precision"], told["hidden"]
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": told["layers"],
    }
    shape["num_attention_heads"] = max(1, hidden // 64)
    settings = Settings(
        reference=reference, shape=shape, steps=told["steps"], seeds=1, batch=8, sequence=256, lr=1e-3,
        warmup_share=told["warmup_share"], clip=variant.clip, features=variant.fields, compile=False,
        loss_gap_bound=LOSS_GAP_BOUND, device=told["device"],
    )  # fmt: skip
    began = time.perf_counter()
    run = Run(settings, _text(), variant.backend or reference, seed)
    for group in run.optimizer.param_groups:
        group["betas"] = BETAS
    if name == REVERSED:
        run.starts = run.starts.flip(1)
    found = run.train(lambda step, loss: None)
    run.accelerator.free_memory()
    kept = {
        key: found[key]
        for key in ("held_out_loss", "final_train_loss", "start_checksum", "unmoved")
    }
    return {"variant": name, "seed": seed, **kept, "minutes": (time.perf_counter() - began) / 60}


_text = functools.cache(load_text)


def results(runs: list[dict]) -> list[dict]:
    """Return the paired gap of each variant to its reference, with a 95 % interval, and the mean
    minutes of a run."""
    losses: dict[str, dict[int, float]] = {name: {} for name in VARIANTS}
    for run in runs:
        losses[run["variant"]][run["seed"]] = run["held_out_loss"]
    rows = []
    for name, by_seed in losses.items():
        minutes = [run["minutes"] for run in runs if run["variant"] == name]
        if by_seed:
            against = VARIANTS[name].against
            gap = None if name == against else paired_gap(by_seed, losses[against])
            row = {"variant": name, "seeds": len(by_seed), "minutes": statistics.fmean(minutes)}
            rows.append({**row, "gap": gap and gap.to_dict()})
    return rows


def main() -> None:
    on = device()
    arguments = options(
        __doc__,
        variants=";".join(name for name in VARIANTS if name not in FURTHER),
        seeds=8,
        steps=160,
        warmup_share=0.5,
        hidden=384,
        layers=6,
        device=(on, *{"cpu", "cuda"} - {on}),
        workers=1,
        minutes=math.inf,
    )
    file = Path(arguments.json)
    record = json.loads(file.read_text()) if file.exists() else {"runs": []}
    told = {
        name: getattr(arguments, name)
        for name in ("steps", "warmup_share", "hidden", "layers", "device")
    }
    chip = machine()["chip"] if arguments.device == "cuda" else cpu_features()
    told |= {"features": chip, "precision": plain(arguments.device), "text": _text().sha256}
    if record["runs"] and {name: record[name] for name in told} != told:
        raise SystemExit(
            f"{file.name} holds runs of other settings or another chip: name another file"
        )
    variants = arguments.variants.split(";")
    asked = {*variants, *(VARIANTS[name].against for name in variants)}
    # a reference first: its pairs are complete at once
    names = [name for name in VARIANTS if name in asked]
    done = {(run["seed"], run["variant"]) for run in record["runs"]}
    jobs = [
        (name, seed)
        for seed in range(arguments.seeds)
        for name in names
        if (seed, name) not in done
    ]
    deadline = time.monotonic() + 60 * arguments.minutes
    attempt = Attempts()
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_before, deadline, *job, told): job for job in jobs}
        for future in as_completed(running):
            if (run := attempt("{}, seed {}".format(*running[future]), future.result)) is None:
                continue
            record["runs"].append(run)
            print(f"{run['variant']}, seed {run['seed']}: {run['held_out_loss']:.4f}", flush=True)
            question = "losses at ten million parameters, paired by seed"
            written = {"machine": machine(), "question": question, **told, "runs": record["runs"]}
            unfinished = file.with_suffix(".part")
            unfinished.write_text(
                json.dumps({**written, "results": results(record["runs"])}, indent=1) + "\n"
            )
            unfinished.replace(file)
    printed("scale-loss", {**told, "results": results(record["runs"])})
    attempt.end()


def _before(deadline: float, name: str, seed: int, told: dict) -> dict | None:
    """Train one variant, unless the time is over; all processes of a machine share its monotonic
    clock."""
    return None if time.monotonic() > deadline else trained(name, seed, told)


if __name__ == "__main__":
    main()
