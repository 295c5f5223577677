"""`fp8-backends convert`: rewrite the weights of a checkpoint in another format, file by file.

Names, dtypes and shapes make the plan, so unknown codes are refused before anything is written.
Files of IN are mapped; the tensors of one file of OUT are in memory.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..checkpoints import exporting
from ..checkpoints.manifest import flush
from ..convert.quantized_layers import INDEX, WITHOUT_PLACE, files_of, json_of, mapped
from ..errors import FP8BackendError
from ..formats.formats import E4M3
from ..formats.scaling import SQUARES, Quantized
from ..tensors.block_codes import BlockCodes, e4m3_layout, layout_of
from ..words import counted
from .terminal import Progress, wrapped

TARGETS = {
    "bf16": None,
    "fp8": exporting.CHECKPOINT_FORMATS["finegrained_fp8"],
    "compressed-tensors": exporting.CHECKPOINT_FORMATS["compressed-tensors"],
}
PROGRESS = "fp8_conversion.json"
"""Written first: the target, and size and time of each file of IN, as `make` compares them."""
CODE_LAYOUTS = (
    ("weight_packed", "weight_scale", "weight_global_scale"),  # compressed-tensors' NVFP4
    ("weight_packed", "weight_scale"),  # its MXFP4
    ("weight", "weight_scale", "weight_scale_2"),  # ModelOpt's NVFP4
    ("weight", "weight_scale_inv"),  # FP8 of DeepSeek and transformers
    ("weight", "weight_scale"),  # of compressed-tensors, ModelOpt and ComfyUI
    ("weight", "scale_weight"),  # of ComfyUI, earlier
    ("_weight_qdata", "_weight_scale"),  # torchao's Float8Tensor
)
"""Names of the codes and scales of a weight."""
CONVERTED_AT_ONCE = 1024
COPIED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
NOT_COPIED = shutil.ignore_patterns(
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", ".*", PROGRESS),
    *("config.json", "*.index.json", "hf_quant_config.json"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads codes in FP8 (DeepSeek's blocks, compressed-tensors, ModelOpt, ComfyUI, torchao), "
        "NVFP4 and MXFP4 from safetensors files, and writes their weights in another format, on a "
        "CPU. All other tensors keep dtype and bits, also under bf16. FP8 codes stay if the format "
        "has scales for them; other weights are rounded. After an interruption run it again: "
        "finished files are kept. Plain models become FP8 by fp8_backends.checkpoints.export."
    )
    parser.add_argument(
        "source", metavar="IN", type=Path, help="a folder with safetensors files, or one such file"
    )
    parser.add_argument("target", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument("--to", choices=TARGETS, required=True, help="fp8: blocks of 128 x 128")
    parser.add_argument("--check", action="store_true", help="reread OUT, and compare every bit")


def run(args: argparse.Namespace) -> int:
    target = args.target.resolve()
    try:
        conversion = Conversion(args.source, TARGETS[args.to])
        conversion.begin(target, args.to)
        with Progress(f"converting to {target}") as progress:
            for file in conversion.files:
                conversion.write(file, target / file.name, args.check, progress)
        conversion.finish(target)
    except (OSError, SafetensorError) as error:
        raise FP8BackendError(
            f"{target}: {error}: then run the command again; finished files are kept"
        ) from None
    done = "written and checked" if args.check else "written"
    print(wrapped(f"{target}: {counted(len(conversion.codes), 'weight')} to {args.to}, {done}"))
    return 0


class Conversion:
    """A plan: files, and codes on the meta device."""

    def __init__(self, source: Path, fmt: exporting.CheckpointFormat | None) -> None:
        self.source = source
        self.files = files_of(source)
        self.format = fmt
        self.places: dict[str, dict[str, Path]] = {}
        """Files of a module's tensors. In OUT they are in the first."""
        modules = {}
        for file in self.files:
            for name, tensor in mapped(file).items():
                module = name[: name.rfind(".") + 1]
                part = name.removeprefix(module)
                self.places.setdefault(module, {})[part] = file
                modules.setdefault(module, {})[part] = tensor.to("meta")
        codes = [self.take_codes(module, parts) for module, parts in modules.items()]
        self.codes = [each for each in codes if each is not None]
        if not self.codes:
            raise FP8BackendError(
                f"{source}: its weights have no codes: fp8_backends.checkpoints.export writes FP8"
            )
        self.grid = None
        if fmt is not None:
            grids = [(codes.shape, exporting.grid_of(_in_fp8(codes))) for codes in self.codes]
            self.grid = exporting.grid_for(fmt, grids)

    def take_codes(self, module: str, parts: dict[str, torch.Tensor]) -> BlockCodes | None:
        """Remove codes and scales from a module's tensors, and return them; None without codes."""
        for part in WITHOUT_PLACE:
            parts.pop(part, None)
        names = next((names for names in CODE_LAYOUTS if parts.keys() >= {*names}), ())
        own = {name: parts.pop(name) for name in names}
        unknown = [
            name for name, t in parts.items() if t.dim() > 1 and t.dtype not in COPIED_DTYPES
        ]
        if not own and not unknown:
            return None
        layout = layout_of(own)
        why = "codes of an unknown format, or without scales"
        codes, *scales = own.values() or [None]
        if len(scales) == 1 and codes.dtype == E4M3.dtype:
            scale = scales[0]
            if scale.dtype != torch.uint8:
                scale = scale.float()
            if scale.numel() == 1:
                scale = scale.reshape(())
            is_rowwise = scale.shape == (len(codes), 1)
            layout = e4m3_layout(scale, (1, codes.shape[-1]) if is_rowwise else SQUARES[:2])
            scales = [scale]
        if layout is not None and not unknown and codes.dim() == 2:
            why = layout.unfit((codes, *scales), layout.shape(codes))
        if why:
            name = (*unknown, *names)[0]
            raise FP8BackendError(
                f"{self.places[module][name]}: {module}{name}: {why}: load it dequantized with "
                "from_pretrained, and call save_pretrained"
            )
        return BlockCodes((codes, *scales), torch.bfloat16, layout)

    def recoded(self, codes: BlockCodes, where: str) -> dict[str, torch.Tensor]:
        """Return a weight for OUT, made from some rows at a time: FP32 values take four times the
        codes."""
        grid = self.grid
        is_tensorwise = exporting.grid_of(_in_fp8(codes)) == exporting.TENSOR
        if grid and self.format.unfit(codes.shape, grid, is_tensorwise):
            grid = None
        pieces = []
        for slab in _slabs(codes, len(codes) if grid == exporting.TENSOR else CONVERTED_AT_ONCE):
            quantized = _in_fp8(slab)
            if grid is None:
                piece = {"weight": slab.exact()}
            else:
                if grid not in exporting.FITS_INTO.get(exporting.grid_of(quantized), ()):
                    values = slab.code_layout.values(slab.parts, torch.float32)
                    quantized = exporting.rounded(values, grid)
                scales = self.format.scales_of(quantized, grid)
                piece = {"weight": quantized.codes, self.format.scale: scales}
            if not all(bool(tensor.float().isfinite().all()) for tensor in piece.values()):
                raise FP8BackendError(f"{where} is not finite: download it again")
            pieces.append(piece)
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def converted(self, file: Path, progress: Progress) -> dict[str, torch.Tensor]:
        """Return the tensors of a file of OUT."""
        tensors = {}
        for i, (module, places) in enumerate(self.places.items()):
            if next(iter(places.values())) != file:
                continue
            progress(file.name, i / len(self.places))
            parts = {
                # mapped for itself: pages count as memory for as long as a mapping lives
                part: mapped(place, [module + part])[module + part]
                for part, place in places.items()
            }
            codes = self.take_codes(module, parts)
            parts = {part: tensor.clone() for part, tensor in parts.items()}
            if codes is not None:
                parts |= self.recoded(codes, f"{file}: {module}weight")
            tensors |= {module + part: tensor for part, tensor in parts.items()}
        return tensors

    def begin(self, target: Path, to: str) -> None:
        """Refuse a folder of another conversion."""
        times = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in self.files}
        record = json.dumps([to, times])
        path = target / PROGRESS
        is_ours = path.exists() and path.read_text() == record
        is_taken = target.exists() and any(target.iterdir()) and not is_ours
        if is_taken or target.is_relative_to(self.source.resolve()):
            raise FP8BackendError(
                f"{target} is in IN, or holds another conversion or other files: name another "
                "folder, or remove it"
            )
        target.mkdir(parents=True, exist_ok=True)
        path.write_text(record)

    def write(self, file: Path, path: Path, checks: bool, progress: Progress) -> None:
        """Write a file, unless it is there, and compare it with IN."""
        is_new = not path.exists()
        if not is_new and not checks:
            return
        tensors = self.converted(file, progress)
        if is_new:
            _replace(path, lambda partial: save_file(tensors, partial, {"format": "pt"}))
        for name, tensor in tensors.items() if checks else ():
            written = mapped(path, [name])[name]
            bits = (each.reshape(-1).view(torch.uint8) for each in (tensor, written))
            is_same = (written.dtype, written.shape) == (tensor.dtype, tensor.shape)
            if not is_same or not torch.equal(*bits):
                raise FP8BackendError(
                    f"{path}: {name} has other bits than IN gives: remove the file, and run the "
                    "command again"
                )

    def finish(self, target: Path) -> None:
        """Copy the other files, and write index and configuration."""
        if self.source.is_file():
            return

        def ignored(folder: str, names: list[str]) -> set[str]:
            # files of a subfolder, such as another module's weights, are none of this conversion
            patterns = NOT_COPIED if Path(folder) == self.source else shutil.ignore_patterns(".*")
            return patterns(folder, names)

        shutil.copytree(self.source, target, ignore=ignored, dirs_exist_ok=True)
        places = {}
        in_fp8 = []
        plain = set()
        for file in self.files:
            for name, tensor in mapped(target / file.name).items():
                module = name.rpartition(".")[0]
                places[name] = file.name
                if tensor.dtype == E4M3.dtype:
                    in_fp8.append(module)
                elif tensor.dim() > 1:
                    plain.add(module)
        contents = {INDEX: {"metadata": {}, "weight_map": places}}
        if config := json_of(self.source / "config.json"):
            config.pop("quantization_config", None)
            if self.format is not None:
                names = sorted(plain.difference(in_fp8))
                config["quantization_config"] = self.format.config(self.grid, names, in_fp8)
            contents["config.json"] = config
        for name, content in contents.items():
            text = json.dumps(content, indent=2)
            _replace(target / name, lambda partial, text=text: partial.write_text(text))


def _slabs(codes: BlockCodes, step: int) -> Iterator[BlockCodes]:
    """Yield rows: FP32 values of all of them would take four times the codes."""
    layout = codes.code_layout
    matrix, scales, *others = codes.parts
    for start in range(0, len(codes), step):
        own = scales
        if layout.blocks is not None:
            sides = layout.blocks.rows
            own = scales[start // sides : -(-(start + step) // sides)]
        yield BlockCodes((matrix[start : start + step], own, *others), codes.dtype, layout)


def _in_fp8(codes: BlockCodes) -> Quantized | None:
    return None if codes.code_layout.is_packed else Quantized(*codes.parts)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under another name, and rename it when its last byte is on the disk."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial)
        flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
