"""Compare losses at 10.7 million parameters, paired by seed, weights and data: Llama, hidden 384, 6 layers, bytes of
Python's sources, 2,048 tokens a step, AdamW with betas 0.9 and 0.95.

    scale_loss.py --json benchmarks/results/scale_loss_cpu_avx2.json --minutes 60
    scale_loss.py --json benchmarks/results/scale_loss_1000_cpu_avx2.json --steps 1000 --seeds 3 --variants msamp:O2

A record is extended by a run at a time, seed by seed over all variants: it can be stopped at any moment, and continued
on another day on a CPU of the same features. `rows reversed` is the reference with each batch in the reverse order,
other sums of the same numbers. Gradient release drops each gradient inside backward, so nothing can be clipped, and its
reference is not clipped either.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

from measuring import cpu_features, machine, plain, table

from fp8_backends.tools.compare.summary import paired_gap
from fp8_backends.tools.compare.training_run import Run
from fp8_backends.tools.compare.workload import Settings, TrainingText, load_text

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


VARIANTS = {
    REFERENCE: Variant(),
    REVERSED: Variant(),
    "native:dynamic": Variant("native:dynamic"),
    "native:delayed": Variant("native:delayed"),
    "native:window": Variant("native:window"),
    "msamp:O2": Variant("msamp:O2"),
    "msamp:O4": Variant("msamp:O4"),
    "msamp:O4, FP8 activations": Variant("msamp:O4", {"saved_activations": "fp8"}),
    UNCLIPPED: Variant(against=UNCLIPPED),
    "msamp:O4, gradient release": Variant("msamp:O4", {"gradient_release": True}, UNCLIPPED),
}


def trained(name: str, seed: int, told: dict, text: TrainingText) -> dict:
    """Train one variant from one seed, and return its losses."""
    variant, reference, hidden = VARIANTS[name], told["precision"], told["hidden"]
    shape = {"hidden_size": hidden, "intermediate_size": 8 * hidden // 3, "num_hidden_layers": told["layers"]}
    shape["num_attention_heads"] = max(1, hidden // 64)
    settings = Settings(
        reference=reference, shape=shape, steps=told["steps"], seeds=1, batch=8, sequence=256, lr=1e-3,
        warmup_share=0.1, clip=variant.clip, features=variant.fields, compile=False, loss_gap_bound=0.01, device="cpu",
    )  # fmt: skip
    began = time.perf_counter()
    run = Run(settings, text, variant.backend or reference, seed)
    for group in run.optimizer.param_groups:
        group["betas"] = BETAS
    if name == REVERSED:
        run.starts = run.starts.flip(1)
    found = run.train(lambda step, loss: print(f"\r{name}, seed {seed}: step {step}, loss {loss:.3f}", end=""))
    print()
    run.accelerator.free_memory()
    kept = {key: found[key] for key in ("held_out_loss", "final_train_loss", "start_checksum", "unmoved")}
    return {"variant": name, "seed": seed, **kept, "minutes": (time.perf_counter() - began) / 60}


def results(runs: list[dict]) -> list[dict]:
    """Return the paired gap of each variant to its reference, with a 95 % interval."""
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        losses.setdefault(run["variant"], {})[run["seed"]] = run["held_out_loss"]
    rows = []
    for name, by_seed in losses.items():
        against = VARIANTS[name].against
        gap = None if name == against else paired_gap(by_seed, losses.get(against, {}))
        minutes = [run["minutes"] for run in runs if run["variant"] == name]
        row = {"variant": name, "seeds": len(by_seed), "minutes": sum(minutes) / len(minutes)}
        rows.append({**row, "gap": gap and gap.to_dict()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further run after so many")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    record = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"runs": []}
    told = {name: getattr(arguments, name) for name in ("steps", "hidden", "layers")}
    told |= {"features": cpu_features(), "precision": plain("cpu")}
    if record["runs"] and {name: record[name] for name in told} != told:
        raise SystemExit(f"{arguments.json.name} holds runs of other settings or another CPU: name another file")
    text, began = load_text(), time.monotonic()
    # a reference first: each of its pairs is complete with the other run
    names = [
        name for name in VARIANTS if name in {*arguments.variants, *(VARIANTS[v].against for v in arguments.variants)}
    ]
    done = {(run["seed"], run["variant"]) for run in record["runs"]}
    for seed, name in ((seed, name) for seed in range(arguments.seeds) for name in names):
        if (seed, name) in done or time.monotonic() - began > 60 * arguments.minutes:
            continue
        record["runs"].append(trained(name, seed, told, text))
        question = "losses at ten million parameters, paired by seed"
        written = {"machine": machine(), "question": question, **told, "text": text.sha256, "runs": record["runs"]}
        unfinished = arguments.json.with_suffix(".part")
        unfinished.write_text(json.dumps({**written, "results": results(record["runs"])}, indent=1) + "\n")
        unfinished.replace(arguments.json)
    header = ["variant", "seeds", "minutes a run", "gap, nats", "half width"]
    rows = [
        [
            row["variant"],
            row["seeds"],
            f"{row['minutes']:.1f}",
            *((row["gap"] or {}).get(key) for key in ("mean", "half_width")),
        ]
        for row in results(record["runs"])
    ]
    print(table(header, rows))


if __name__ == "__main__":
    main()
