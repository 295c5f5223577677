"""Execute the example notebooks. `python tests/docs/notebooks.py --write` stores their outputs,
without times and names of this machine."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

sys.path.append(str(Path(__file__).resolve().parents[1]))
from documents import ROOT  # noqa: E402

NOTEBOOKS = sorted((ROOT / "fp8_backends" / "examples").glob("*.ipynb"))


def executed(path: Path) -> nbformat.NotebookNode:
    """Run a notebook in an empty folder, on the CPU. Raises `CellExecutionError` for a cell that
    fails."""
    notebook = nbformat.read(path, 4)
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")
    }
    environment |= {
        "PATH": programs,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=240, kernel_name="python3", record_timing=False)
        client.resources = {"metadata": {"path": folder}}
        client.execute(env=environment)
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
    }
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return one output for each stream, however the kernel cut it."""
    streams, kept = {}, []
    for output in outputs:
        known = streams.get(output.get("name"))
        if known is not None:
            known.text += output.text
            continue
        kept.append(output)
        if output.output_type == "stream":
            streams[output.name] = output
    return kept


def text_of(output: nbformat.NotebookNode) -> str:
    """Return an output's text, of several forms the plain one."""
    return output.text if output.output_type == "stream" else output.data.get("text/plain", "")


def structure(notebook: nbformat.NotebookNode) -> list[list[tuple]]:
    """Describe the outputs of each code cell: their kinds, their numbers of lines, and proof lines
    without engines."""
    return [
        [
            (
                output.output_type,
                output.get("name") or sorted(output.data),
                len(text_of(output).splitlines()),
                re.findall(r"^(\S+: .* of weight FLOPs in FP8, .*) \(", text_of(output), re.M),
            )
            for output in cell.outputs
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


if __name__ == "__main__":
    for path in NOTEBOOKS:
        notebook = executed(path)
        if "--write" in sys.argv[1:]:
            nbformat.write(notebook, path)
        for cell in notebook.cells:
            print(*(f"{text_of(output)}\n" for output in cell.get("outputs", ())))
