"""Compare predicted steps with published ones: speed of FP8 over bf16 in runs of others, none of
which calibrated the time model (`fp8_backends/compute/rates.py`).

    published.py --json benchmarks/results/published.json

Every source is left out of the calibration, which reads this project's records of one H200.
Settings that a source does not state are assumed, and the record says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from measuring import table, write_json  # noqa: E402

from fp8_backends.compute import rates  # noqa: E402


class Run(NamedTuple):
    source: str
    what: str
    model: str
    chip: str
    devices: int
    batch: int
    sequence: int
    compiled: bool
    figures: tuple[tuple[str, float, float], ...]
    """Backend, and tokens a second of a device in bf16 and with it."""
    assumed: str = ""


TORCHAO = "TorchAO, docs/source/workflows/training.md at 36027d8"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at b5bcd76"
NVFP4 = "torchtitan, components/quantization/nvfp4.md at b5bcd76"
TE = "TransformerEngine, docs/examples/gemm_profiling/gemm_profiling.rst at d0067d0"
AWS = "AWS, How FP8 boosts LLM training by 18 % on Amazon SageMaker P5 instances"
SAC = "no checkpointing for per-op selective one"
NODES = (1, 2, 4, 8, 16, 32)
OF_7B = ((9350, 11000), (9400, 10750), (9300, 10600), (9250, 10400), (8700, 10100), (7900, 9700))
OF_1B = (
    (40200, 40800),
    (38500, 41600),
    (39500, 42000),
    (38200, 41800),
    (35500, 39500),
    (33500, 38000),
)
LLAMA_2 = "Llama 2 at 4,096 tokens, FSDP, eager, no checkpointing"

RUNS = (
    Run(TORCHAO, "8B, H100", "8b", "h100", 8, 1, 8192, True,
        (("ao:tensorwise", 6150, 7689.5), ("ao:rowwise", 6150, 6768)), SAC),
    Run(TORCHAO, "8B, B200", "8b", "b200", 8, 1, 8192, True,
        (("ao:tensorwise", 8307.5, 10417), ("ao:rowwise", 8307.5, 8640.5), ("native:mxfp8", 8307.5, 9969)),
        f"{SAC}, this package's casts for TorchAO's mxfp8_cublas"),
    Run(TITAN, "8B, 8 H100", "8b", "h100", 8, 2, 8192, True, (("ao:tensorwise", 6667, 8532),), SAC),
    Run(TITAN, "8B, 128 "
               "H100", "8b", "h100", 128, 2, 8192, True, (("ao:tensorwise", 6514, 8380),), SAC),
    Run(NVFP4, "8B, 4 "
               "Blackwells", "8b", "b200", 4, 32, 2048, True, (("native:mxfp8", 21919, 28084),),
        "B200s, no checkpointing, this package's casts"),
    *(Run(AWS, "7B, nodes: "
               f"{n}", "7b", "h100", 8 * n, 1, 4096, False, (("te:delayed", *found),), LLAMA_2)
      for n, found in zip(NODES, OF_7B, strict=True)),
    *(Run(AWS, f"1B, nodes: {n}", "1b", "h100", 8 * n, 4, 4096, False, (("te:delayed", *found),),
          f"{LLAMA_2}, 18 layers of width 2,048")
      for n, found in zip(NODES, OF_1B, strict=True)),
)  # fmt: skip
LAYER, LAYER_TOKENS = ((4096, 12_288), (4096, 4096), (4096, 16_384), (16_384, 4096)), 15_872
LAYER_MS = {"bf16": 32.014, "delayed": 18.978, "dynamic": 20.285, "blockwise": 22.882}
"""TransformerEngine's H200 NVL: products of a layer with their casts, eager, in bf16."""
SHAPES = {
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
    "7b": (4096, 11_008, 32, 32, 32, 32_000),
    "1b": (2048, 5504, 18, 16, 16, 32_000),
}
"""Width, MLP, layers, heads, key-value heads, vocabulary."""


def model_of(name: str):
    from transformers import LlamaConfig

    from fp8_backends.tools.estimate import ModelShape

    width, mlp, layers, heads, key_value, vocabulary = SHAPES[name]
    sizes = {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    sizes |= {
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        "tie_word_embeddings": False,
    }
    return ModelShape(name, LlamaConfig(**sizes, max_position_embeddings=8192, use_cache=False))


def predicted(run: Run, traced: dict) -> list[dict]:
    """Predict a run; `traced` keeps the traces for runs of the same model and batch."""
    from fp8_backends.tools.estimate import Workload, estimate

    sizes = {"devices": run.devices, "batch": run.batch, "sequence": run.sequence}
    workload = Workload(model=model_of(run.model), chip=run.chip, compiled=run.compiled, **sizes)
    known = traced.setdefault((run.model, run.batch, run.sequence), {})
    plain, *others = estimate(
        workload, ["bf16", *(name for name, *_ in run.figures)], ["fsdp2"], traced=known
    )
    found = []
    for (backend, bf16, fp8), each in zip(run.figures, others, strict=True):
        seen = {"source": run.source, "what": run.what, "backend": backend, "assumed": run.assumed}
        seen |= {
            "published": fp8 / bf16,
            "predicted": each.speedup[1],
            "interval": [each.speedup[0], each.speedup[2]],
        }
        found.append(seen | {"bf16_published": bf16, "bf16_predicted": plain.tokens_per_second})
    return found


def layers() -> list[dict]:
    """Predict TransformerEngine's table, under a load of products only."""
    found = []
    for scaling, milliseconds in list(LAYER_MS.items())[1:]:
        kinds, casts = rates.kinds_of("te", scaling), rates.casts_of("te", scaling, False)
        seconds = {
            sustained: [
                sum(
                    rates.product_seconds(
                        kind, *rates.shape_of(name, LAYER_TOKENS, k, n), sustained=sustained
                    )
                    for k, n in LAYER
                    for name, kind in each.items()
                )
                for each in (dict.fromkeys(kinds, rates.BF16), kinds)
            ]
            for sustained in (False, True)
        }
        elements = sum(LAYER_TOKENS * (k + n) + k * n for k, n in LAYER)
        cast = rates.memory_seconds(casts.bytes * elements, rates.H200)
        cool, hot = (plain / (fp8 + cast) for plain, fp8 in seconds.values())
        spread = 1 + rates.constant("spread of ratios")
        seen = {
            "source": TE,
            "what": "a layer's products, H200 NVL",
            "backend": f"te:{scaling}",
            "assumed": "",
        }
        seen |= {"published": LAYER_MS["bf16"] / milliseconds, "predicted": cool}
        seen["interval"] = [cool / spread, hot * spread]
        found.append(seen)
    return found


def signed(row: dict) -> str:
    return f"{100 * (row['predicted'] / row['published'] - 1):+.1f} %"


def errors(rows: list[dict]) -> list[float]:
    """Return |predicted / published - 1|, sorted."""
    return sorted(abs(row["predicted"] / row["published"] - 1) for row in rows)


def all_rows() -> list[dict]:
    traced: dict = {}
    return [*layers(), *(row for run in RUNS for row in predicted(run, traced))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows = all_rows()
    write_json(arguments.json, {"question": "published runs, predicted", "results": rows})
    cells = [
        [*(row[name] for name in ("what", "backend", "published", "predicted")), signed(row)]
        for row in rows
    ]
    print(table(["run", "backend", "published", "predicted", "error"], cells))


if __name__ == "__main__":
    main()
