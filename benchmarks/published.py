"""Compare predicted steps with published ones: speed of FP8 over bf16 in runs of others, none of
which calibrated the time model (`fp8_backends/compute/rates.py`).

    published.py --json benchmarks/results/published.json

Every source is left out of the calibration, which reads this project's records of one H200.
Settings that a source does not state are assumed, and the record says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from measuring import options, write_json  # noqa: E402
from tables import published  # noqa: E402

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
    weights: str = "fp32"


TORCHAO = "TorchAO, docs/source/workflows/training.md at 36027d8"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at b5bcd76"
NVFP4 = "torchtitan, components/quantization/nvfp4.md at b5bcd76"
TE = "TransformerEngine, docs/examples/gemm_profiling/gemm_profiling.rst at d0067d0"
AWS = "AWS, How FP8 boosts LLM training by 18 % on Amazon SageMaker P5 instances"
LLMQ = "LLMQ, IST-DASLab/llmq, README.md and benchmarks at b77d969 (arXiv 2512.15306)"
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
STEP_TOKENS, LLMQ_SEQUENCE = 524_288, 1024
"""Tokens of a step of LLMQ, from all devices and accumulated microbatches."""
ONE_BATCH = (
    "accumulated microbatches as one batch, no recomputation, no offload, FSDP2 for its ZeRO, "
    "PyTorch's kernels for fused C++"
)
OF_LLMQ = {
    # tokens a second of all devices in bf16 and in FP8, from the last line of each log
    ("h100", 1): {
        "0.5B": (149_455, 164_612), "1.5B": (58_710, 72_777), "3B": (30_958, 40_473),
        "7B": (13_863, 19_194), "14B": (6321, 9364),
    },
    ("h100", 8): {
        "0.5B": (1_127_501, 1_285_020), "1.5B": (456_697, 564_966), "3B": (240_279, 313_195),
        "7B": (112_774, 159_261), "14B": (48_866, 73_635),
    },
    # the command of 7B in bf16 says e4m3; its share of the peak is bf16's
    ("rtx4090", 1): {
        "0.5B": (39_842, 47_610), "1.5B": (14_063, 20_327), "3B": (7001, 10_651),
        "7B": (2777, 4328), "14B": (1348, 2000),
    },
    ("rtx4090", 4): {
        "0.5B": (154_931, 181_792), "1.5B": (52_418, 71_948), "3B": (26_017, 38_269),
        "7B": (10_897, 16_487), "14B": (5268, 7844), "32B": (2208, 3395),
    },
    ("rtxpro6000", 1): {
        "0.5B": (85_991, 95_830), "1.5B": (32_401, 40_264), "3B": (17_186, 23_113),
        "7B": (8080, 11_544), "14B": (4038, 6024),
    },
    ("rtxpro6000", 4): {
        "0.5B": (340_226, 380_470), "1.5B": (128_849, 159_552), "3B": (68_284, 91_578),
        "7B": (31_990, 46_311), "14B": (15_866, 23_770), "32B": (5871, 9042),
    },
    ("rtxpro6000", 8): {
        "0.5B": (673_027, 744_727), "1.5B": (255_750, 315_077), "3B": (135_720, 181_415),
        "7B": (62_519, 91_323), "14B": (30_395, 46_920), "32B": (12_245, 18_697),
    },
    # without logs: hours to a billion tokens in README.md, or tokens a second, the finer of the two
    ("l40s", 1): {
        "0.5B": (43_860, 46_948), "1.5B": (17_000, 20_000), "3B": (8961, 11_111),
        "7B": (3968, 5144), "14B": (1502, 1747),
    },
    ("l40s", 4): {
        "0.5B": (170_068, 185_185), "1.5B": (65_104, 79_365), "3B": (35_014, 43_860),
        "7B": (15_000, 18_000), "14B": (6313, 8681),
    },
    # not 1.5B on one device and 14B: bf16 recomputes whole blocks, FP8 none; 20 % of the peak
    ("rtx5090", 1): {"0.5B": (55_006, 68_871), "3B": (8600, 12_980), "7B": (3086, 4409)},
    ("rtx5090", 4): {"3B": (31_990, 48_031), "7B": (13_889, 18_896)},
}  # fmt: skip

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
    *(Run(LLMQ, f"{model}, {devices} {chip}", model, chip, devices,
          STEP_TOKENS // LLMQ_SEQUENCE // devices, LLMQ_SEQUENCE, True,
          (("native:dynamic", bf16 / devices, fp8 / devices),), ONE_BATCH, "bf16")
      for (chip, devices), speeds in OF_LLMQ.items()
      for model, (bf16, fp8) in speeds.items()),
)  # fmt: skip
LAYER, LAYER_TOKENS = ((4096, 12_288), (4096, 4096), (4096, 16_384), (16_384, 4096)), 15_872
LAYER_MS = {"bf16": 32.014, "delayed": 18.978, "dynamic": 20.285, "blockwise": 22.882}
"""TransformerEngine's H200 NVL: products of a layer with their casts, eager, in bf16."""
SHAPES = {
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
    "7b": (4096, 11_008, 32, 32, 32, 32_000),
    "1b": (2048, 5504, 18, 16, 16, 32_000),
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "3B": (2048, 11_008, 36, 16, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
    "14B": (5120, 13_824, 48, 40, 8, 152_064),
    "32B": (5120, 27_648, 64, 40, 8, 152_064),
}
"""Width, MLP, layers, heads, key-value heads, vocabulary."""
QWEN = ("0.5B", "1.5B", "3B", "7B", "14B", "32B")
"""Qwen 2.5; the first three tie embedding and head."""
CARDS = ("rtx4090", "l40s", "rtx5090", "rtxpro6000", "h100")
"""Chips in the README's prediction, and one with measured steps of the same kind."""
CARD_MODELS, CARD_BATCH = ("1.5B", "7B"), 8


def model_of(name: str):
    from transformers import LlamaConfig, Qwen2Config

    from fp8_backends.tools.estimate import ModelShape

    width, mlp, layers, heads, key_value, vocabulary = SHAPES[name]
    kind = Qwen2Config if name in QWEN else LlamaConfig
    sizes = {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    sizes |= {
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        "tie_word_embeddings": name in QWEN[:3],
    }
    return ModelShape(name, kind(**sizes, max_position_embeddings=8192, use_cache=False))


def predicted(run: Run, traced: dict) -> list[dict]:
    """Predict a run; `traced` keeps the traces for runs of the same model and batch."""
    from fp8_backends.tools.estimate import Workload, estimate

    sizes = {"devices": run.devices, "batch": run.batch, "sequence": run.sequence}
    workload = Workload(
        model=model_of(run.model),
        chip=run.chip,
        compiled=run.compiled,
        weights=run.weights,
        **sizes,
    )
    known = traced.setdefault((run.model, run.batch, run.sequence, run.weights), {})
    sharding = "fsdp2" if run.devices > 1 else "none"
    plain, *others = estimate(
        workload, ["bf16", *(name for name, *_ in run.figures)], [sharding], traced=known
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


def cards() -> list[dict]:
    """Predict a step of this package on `CARDS`: FP32 weights under bf16 autocast, compiled."""
    from fp8_backends.tools.estimate import Workload, estimate

    traced: dict = {model: {} for model in CARD_MODELS}
    found = []
    for chip in CARDS:
        for model in CARD_MODELS:
            workload = Workload(
                model=model_of(model),
                chip=chip,
                batch=CARD_BATCH,
                sequence=LLMQ_SEQUENCE,
                compiled=True,
            )
            _, fp8 = estimate(workload, ["bf16", "native:dynamic"], traced=traced[model])
            low, middle, high = fp8.speedup
            bf16, theirs = OF_LLMQ[chip, 1].get(model, (0, 0))
            seen = {"chip": chip, "model": model, "predicted": middle, "interval": [low, high]}
            found.append(seen | {"published": theirs / bf16 if bf16 else None})
    return found


OFFLOADED = {"backend": "msamp:O4", "offload": "states", "include": "+lm_head", "fused_head": True}
OFFLOADED_STEPS = (("7b", 28, 1), ("7b", 8, 64), ("7B", 18, 1), ("7B", 8, 64))
"""Llama 2 and Qwen 2.5 of 7 billion parameters: sequences at a time, and microbatches of a step."""
HOST_CORES = 16


def offloaded() -> list[dict]:
    """Predict full fine-tuning on one RTX 4090 with steps in the host: bf16 weights where no level
    stores them, compiled, checkpointing."""
    from fp8_backends.tools.estimate import Workload, estimate

    found = []
    for model, batch, microbatches in OFFLOADED_STEPS:
        workload = Workload(
            model=model_of(model),
            chip="rtx4090",
            memory=24 * 2**30,
            batch=batch,
            sequence=LLMQ_SEQUENCE,
            microbatches=microbatches,
            checkpointing=True,
            compiled=True,
            weights="bf16",
            cores=HOST_CORES,
        )
        (one,) = estimate(workload, [{**OFFLOADED, "gradient_release": microbatches == 1}])
        tokens = microbatches * batch * LLMQ_SEQUENCE
        seen = {"model": model, "batch": batch, "microbatches": microbatches, "fits": one.fits}
        seen |= {"peak": one.peak, "host": one.host, "parts": dict(one.time.parts)}
        speeds = (tokens / one.time.high, one.tokens_per_second, tokens / one.time.low)
        found.append(seen | {"tokens_per_second": speeds})
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
                for each in (dict.fromkeys(kinds, rates.BF16_PRODUCT), kinds)
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


def rows_of(runs: Iterable[Run]) -> list[dict]:
    traced: dict = {}
    return [row for run in runs for row in predicted(run, traced)]


def main() -> None:
    arguments = options(__doc__)
    rows = [*layers(), *rows_of(RUNS)]
    question = "published runs, predicted"
    record = write_json(arguments, question, results=rows, cards=cards(), offloaded=offloaded())
    print(published({"published": record}))


if __name__ == "__main__":
    main()
