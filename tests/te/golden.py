"""Record golden tensors of TransformerEngine, the results of its kernels on small inputs, and
compare them with `native`.

    python tests/te/golden.py --out DIR          on a GPU: records DIR/te_golden.safetensors, then compares
    python tests/te/golden.py --compare FILE     anywhere, without TransformerEngine: compares only

One `te.Linear` without bias, five steps: ordinary values, a hundred times as large, all zero, an
inf, ordinary again. Recorded for each recipe and step: input, weight and output gradient; their FP8
codes and scale_inv as the products get them, in both directions for blocks; output and gradients;
scales and amax histories after the step. `native` must match codes, scales and histories bitwise;
products are compared with exact products of the recorded codes. Exits with 1 at a difference, with
2 if TransformerEngine cannot run. `--standin` rehearses on a CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(Path(__file__).parent), str(ROOT)]

from measuring import machine, options  # noqa: E402
from parity import cannot_run  # noqa: E402

from fp8_backends.formats import scaling  # noqa: E402
from fp8_backends.formats.formats import E4M3, E5M2  # noqa: E402
from fp8_backends.kernels.quantize import quantize  # noqa: E402

TOKENS, IN, OUT = 16, 144, 16  # a second, partial block of 128 in the input
HISTORY = 4
RECIPES = {
    # name: (TransformerEngine's class, its fields, formats of forward and gradient)
    "delayed_max": (
        "DelayedScaling",
        {"amax_history_len": HISTORY, "amax_compute_algo": "max"},
        (E4M3, E5M2),
    ),
    "delayed_recent": (
        "DelayedScaling",
        {"amax_history_len": HISTORY, "amax_compute_algo": "most_recent"},
        (E4M3, E5M2),
    ),
    "dynamic": ("Float8CurrentScaling", {}, (E4M3, E5M2)),
    "blockwise": ("Float8BlockScaling", {}, (E4M3, E4M3)),
}
OPERANDS = {"TN": ("w", "x"), "NN": ("w_columns", "dy"), "NT": ("x_columns", "dy_columns")}
"""By the layout of a product: fprop, dgrad and wgrad, and the role of each operand."""
LARGEST_FILE = 400_000


def inputs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, in] and dy [tokens, out], bf16."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, IN, generator=generator) * (100.0 if step == 1 else 1.0)
    dy = torch.randn(TOKENS, OUT, generator=generator) * 1e-3
    if step == 2:
        x, dy = torch.zeros_like(x), torch.zeros_like(dy)
    if step == 3:
        x[3, 5] = float("inf")
    return x.bfloat16(), dy.bfloat16()


STEPS = 5


# Recording


def record(device: str) -> dict[str, torch.Tensor]:
    import transformer_engine.pytorch as te
    import transformer_engine.pytorch.module.linear as of_linear
    from transformer_engine.common import recipe as recipes

    found: dict[str, torch.Tensor] = {}
    multiply = of_linear.general_gemm
    autocast = te.autocast if hasattr(te, "autocast") else te.fp8_autocast  # before 2.9
    keyword = "recipe" if hasattr(te, "autocast") else "fp8_recipe"
    for name, (cls, fields, _) in RECIPES.items():
        recipe = getattr(recipes, cls)(**fields)
        layer = te.Linear(IN, OUT, bias=False, params_dtype=torch.bfloat16, device=device)
        weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(99)) * 0.05
        with torch.no_grad():
            layer.weight.copy_(weight)
        found["w"] = layer.weight.detach().cpu().clone()
        for step in range(STEPS):
            prefix = f"{name}.{step}."
            of_linear.general_gemm = watched(multiply, found, prefix)
            try:
                x, dy = (each.to(device) for each in inputs(step))
                x.requires_grad_()
                with autocast(enabled=True, **{keyword: recipe}):
                    y = layer(x)
                y.backward(dy)
            finally:
                of_linear.general_gemm = multiply
            found |= {f"x.{step}": x.detach().cpu(), f"dy.{step}": dy.cpu()}
            for what, tensor in {"y": y, "dx": x.grad, "dw": layer.weight.grad}.items():
                found[prefix + what] = tensor.detach().cpu().clone()
            layer.weight.grad = None
            if name.startswith("delayed"):
                keep_state(found, prefix, layer)
    return {key: tensor.contiguous() for key, tensor in found.items()}


def watched(multiply: Any, found: dict[str, torch.Tensor], prefix: str) -> Any:
    """Wrap TransformerEngine's function of every product, and keep the operands."""

    def multiply_and_keep(a, b, *args, **kwargs):
        for operand, tensor in zip(OPERANDS[kwargs.get("layout", "TN")], (a, b), strict=True):
            keep_operand(found, prefix + operand, tensor)
        return multiply(a, b, *args, **kwargs)

    return multiply_and_keep


def keep_operand(found: dict[str, torch.Tensor], key: str, operand: Any) -> None:
    """Codes (uint8) and scale_inv of one of TransformerEngine's quantized tensors, as rows of the
    contraction."""
    columns = key.endswith("_columns")
    if hasattr(operand, "_rowwise_data"):
        side = "columnwise" if columns else "rowwise"
        codes, scale_inv = getattr(operand, f"_{side}_data"), getattr(operand, f"_{side}_scale_inv")
        if not getattr(operand, "_is_2D_scaled", False):
            scale_inv = scale_inv.T  # kept in the order of the GPU's product
    elif columns:
        return  # the same codes, transposed
    else:
        codes, scale_inv = operand._data, operand._scale_inv
        codes = operand._transpose.T if codes is None else codes
    found[key] = codes.detach().cpu().clone().view(torch.uint8)
    found[f"{key}.scale_inv"] = scale_inv.detach().float().cpu().clone()


def keep_state(found: dict[str, torch.Tensor], prefix: str, layer: Any) -> None:
    """Scales and histories of input, weight and output gradient after the step."""
    forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
    scale = torch.cat([forward.scale[:2], backward.scale[:1]])
    history = torch.cat([forward.amax_history[:, :2], backward.amax_history[:, :1]], dim=1)
    found |= {
        f"{prefix}scale": scale.detach().cpu(),
        f"{prefix}amax_history": history.detach().cpu(),
    }


# Comparing with `native`


def differences(found: dict[str, torch.Tensor]) -> list[str]:
    """Describe differences between `native` and the recorded tensors."""
    wrong: list[str] = []
    for name, (_, fields, formats) in RECIPES.items():
        state = scaling.new_delayed_state(HISTORY)
        for step in range(STEPS):
            tensors = {"x": found[f"x.{step}"], "w": found["w"], "dy": found[f"dy.{step}"]}
            prefix = f"{name}.{step}."
            for number, (operand, tensor) in enumerate(tensors.items()):
                fmt = formats[operand == "dy"]
                if name.startswith("delayed"):
                    amax = scaling.tensor_amax(scaling.without_nan(tensor))
                    made = quantize(
                        tensor, fmt, scaling.delayed_scale(state, number)
                    ).along_columns()
                    scaling.record_amax(state, number, amax)
                    wrong += unequal(found, prefix + operand, made)
                elif name == "dynamic":
                    wrong += unequal(found, prefix + operand, quantize(tensor, fmt).along_columns())
                else:
                    blocks = scaling.SQUARES if operand == "w" else scaling.VECTORS
                    wrong += unequal(found, prefix + operand, blocks.quantize(tensor, fmt))
                    wrong += unequal(
                        found, f"{prefix}{operand}_columns", blocks.quantize(tensor.T, fmt)
                    )
            if name.startswith("delayed"):
                maxima = torch.tensor([formats[0].max, formats[0].max, formats[1].max])
                state = scaling.rolled_delayed_states(
                    state[None], maxima, 0, fields["amax_compute_algo"], 1
                )[0]
                wrong += unequal_state(found, prefix, state)
            wrong += wrong_products(found, prefix, formats)
    return wrong


def unequal(found: dict[str, torch.Tensor], key: str, made: scaling.Quantized) -> list[str]:
    codes, scale_inv = found[key], found[f"{key}.scale_inv"]
    if not torch.equal(made.codes.view(torch.uint8), codes):
        differing = (made.codes.view(torch.uint8) != codes).sum().item()
        return [f"{key}: {differing} of {codes.numel()} codes differ"]
    ours = torch.atleast_2d(made.scale_inv)
    theirs = torch.atleast_2d(scale_inv)[: ours.shape[0], : ours.shape[1]]
    finite = ~ours.isnan()  # an inf shows in native's scale, and not in TransformerEngine's
    return (
        []
        if torch.equal(ours[finite], theirs.expand_as(ours)[finite])
        else [f"{key}: scale_inv differs"]
    )


def unequal_state(found: dict[str, torch.Tensor], prefix: str, state: torch.Tensor) -> list[str]:
    values = state.view(torch.float32)
    ours = {"scale": values[:, scaling.SCALE], "amax_history": values[:, scaling.HISTORY :].T}
    return [
        f"{prefix}{key} differs"
        for key, value in ours.items()
        if not torch.equal(value, found[prefix + key])
    ]


def wrong_products(found: dict[str, torch.Tensor], prefix: str, formats: tuple) -> list[str]:
    """Return results further from the exact product of the recorded codes than rounding allows.

    A bf16 result is off by half a step, 2**-9 of it; tensor cores keep at least 13 bits of a sum's
    parts.
    """
    values = {key: recorded_values(found, prefix, key, formats) for key in ("x", "w", "dy")}
    columns = {
        key: recorded_values(found, prefix, f"{key}_columns", formats) for key in ("x", "w", "dy")
    }
    for key, value in columns.items():
        columns[key] = values[key].T if value is None else value
    exact = {
        "y": (values["x"], values["w"].T),
        "dx": (values["dy"], columns["w"].T),
        "dw": (columns["dy"], columns["x"].T),
    }
    wrong = []
    for key, (a, b) in exact.items():
        off = (found[prefix + key].double() - a @ b).abs()
        bound = 2**-8 * (a @ b).abs() + 2**-12 * (a.abs() @ b.abs()) + 1e-38
        if not (off <= bound).all():
            wrong.append(
                f"{prefix}{key}: {(off / bound).nan_to_num(nan=torch.inf).max().item():.3g} times "
                "its bound"
            )
    return wrong


def recorded_values(
    found: dict[str, torch.Tensor], prefix: str, key: str, formats: tuple
) -> torch.Tensor | None:
    """Codes times scales in FP64, rows along the contraction."""
    if prefix + key not in found:
        return None
    codes = found[prefix + key].view(formats[key.startswith("dy")].dtype).double()
    scale_inv = torch.atleast_2d(found[f"{prefix}{key}.scale_inv"].double())
    if not prefix.startswith("blockwise"):
        return codes * scale_inv
    if key.startswith("w"):
        scale_inv = scale_inv.repeat_interleave(128, 0)
    scale_inv = scale_inv.repeat_interleave(128, 1)
    return codes * scale_inv[: codes.shape[0], : codes.shape[1]]


def main() -> int:
    from safetensors.torch import load_file, save_file

    arguments = options(__doc__, out=".", compare=str, standin=False)
    path = Path(arguments.compare or f"{arguments.out}/te_golden.safetensors")
    if arguments.compare is None:
        if reason := cannot_run(arguments.standin):
            print(f"golden tensors cannot be recorded: {reason}", file=sys.stderr)
            return 2
        found = record("cpu" if arguments.standin else "cuda")
        path.parent.mkdir(parents=True, exist_ok=True)
        kernels = "the tests' stand-in on a CPU" if arguments.standin else "TransformerEngine's"
        save_file(found, path, {"machine": json.dumps(machine()), "kernels": kernels})
        assert path.stat().st_size <= LARGEST_FILE, (
            f"{path.stat().st_size} bytes are too many for test data"
        )
    wrong = differences(load_file(path))
    verdict = f"{len(wrong)} tensors differ from native's" if wrong else "native's are the same"
    print(f"{path.name}, {path.stat().st_size} bytes: {verdict}")
    for each in wrong[:40]:
        print(f"    {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
