"""Train widely used architectures (`architectures.py`) with each backend, and verify its reports on
them.

For every architecture and backend:

* the tiny form takes some steps on one batch with Accelerate, and its loss must fall;
* the FP8 share of its audit is compared with `torch.utils.flop_counter`;
* it is saved with `save_pretrained` and loaded by the stock library; after restoring the trained
  model, both predictions must agree bitwise;
* the peak memory of a training step of the small form is estimated and measured.

Published shapes are traced for a training step on tensors without memory, like in `fp8-backends
estimate`.

`TE_SITE=FOLDER python benchmarks/models.py --standin` adds TransformerEngine over the tests'
stand-in for its kernels (`tests/te/standin`), whose memory is not weighed. FOLDER holds the
packages of tests/te/requirements.txt.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
from pathlib import Path

import architectures
import torch
import transformers
from estimate import estimated_and_measured_peak
from measuring import options, write_json
from tables import Table, by_model, of_models, published_shapes
from training import Prepared

BACKENDS = ("native:dynamic", "ao:tensorwise", "msamp:O2", "msamp:O3", "msamp:O4")
TE = "te:delayed"
_MIXTRAL_8X22B = {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
}
SHAPES = {
    "GPT-NeoX 20B": transformers.GPTNeoXConfig(use_cache=False),
    "Llama 2 7B": transformers.LlamaConfig(use_cache=False),
    "Mixtral 8x7B": transformers.MixtralConfig(use_cache=False),
    "Mixtral 8x22B": transformers.MixtralConfig(use_cache=False, **_MIXTRAL_8X22B),
}
"""Published shapes. transformers' defaults are those of the first three."""


def trained(name: str, backend: str, steps: int) -> dict:
    """Return losses, both shares, and if the saved model predicts the same."""
    import fp8_backends

    prepared = Prepared(backend, lambda: architectures.build(name), 1e-3)
    model, batch, losses = prepared.model, architectures.batch(name), []
    for _ in range(steps):
        loss = architectures.loss_of(model, batch)
        prepared.accelerator.backward(loss)
        prepared.optimizer.step()
        prepared.optimizer.zero_grad()
        losses.append(loss.item())
    audit = fp8_backends.audit(model)
    return {
        "losses": losses,
        "layers": len(audit.products),
        "flops_share": audit.flops_share,
        "flops_share_by_pytorch": architectures.flops_share(name, audit.products),
        "reloaded_equal": _predicts_the_same(
            prepared.accelerator.unwrap_model(model, keep_fp32_wrapper=False), batch
        ),
    }


def _predicts_the_same(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> bool:
    """Tell if the stock library loads the saved model and predicts the same bits."""
    import fp8_backends

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(folder).eval()
    fp8_backends.restore(model)
    with torch.no_grad():
        return torch.equal(
            architectures.outputs(model.eval(), batch), architectures.outputs(loaded, batch)
        )


def traced(title: str, backends: list[str]) -> dict:
    """Parameters of a published shape, and by backend the FP8 share and the bytes of weights,
    gradients and states."""
    from fp8_backends.tools.estimate import ModelShape, Workload, estimate

    workload = Workload(model=ModelShape(title, SHAPES[title]))
    found = estimate(workload, backends)
    return {
        "model": title,
        "parameters": workload.model.parameters,
        "flops_share": {each.backend: each.flops_share for each in found},
        "static": {each.backend: each.static for each in found},
    }


def main() -> None:
    arguments = options(
        __doc__,
        models=",".join(architectures.ARCHITECTURES),
        backends=",".join(BACKENDS),
        size=tuple(reversed(architectures.SIZES)),
        steps=8,
        standin=False,
    )
    results: list[dict] = []
    names, backends = arguments.models.split(","), arguments.backends.split(",")
    for name, backend in itertools.product(names, backends):
        result = {"model": name, "backend": backend, **trained(name, backend, arguments.steps)}
        result["estimated_peak"], result["measured_peak"] = estimated_and_measured_peak(
            lambda name=name: architectures.WithLoss(architectures.build(name, arguments.size)),
            lambda name=name: architectures.batch(name, arguments.size),
            backend,
        )
        results.append(result)
        print(name, backend, flush=True)
        write_json(arguments, "models", results=results)
    if arguments.standin:  # last: all others run in a process without TransformerEngine
        activate_standin()
        backends.append(TE)
        results += [
            {"model": name, "backend": TE, **trained(name, TE, arguments.steps)} for name in names
        ]
    shapes = [traced(title, backends) for title in SHAPES]
    record = write_json(arguments, "models", results=results, shapes=shapes)
    print(Table({}, of_models, by_model, note=published_shapes).of(record))


def activate_standin() -> None:
    """Load TransformerEngine over the tests' stand-in for its kernels."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "te"))
    from standin import activate

    activate()
    importlib.import_module("transformer_engine.pytorch")


if __name__ == "__main__":
    main()
