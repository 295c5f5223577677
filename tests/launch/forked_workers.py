"""Fork workers from this process, each with the exact command and environment of a launcher.

In `test_launch_for_real.py` launchers start them.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

# while this process loads the package: each worker must connect it
os.environ["FP8_BACKENDS_DISABLE"] = "1"

import accelerate.commands.launch  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torchao.float8  # noqa: E402, F401
from accelerate.state import PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from intercepted import Started  # noqa: E402

import fp8_backends  # noqa: E402, F401
from fp8_backends.accelerate_plugin import launch  # noqa: F401

del os.environ["FP8_BACKENDS_DISABLE"]


def prepare(folder: Path, deepspeed: bool) -> None:
    """Load the modules of the first training step, without a backward pass: no process may be
    forked after one."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    accelerate.commands.launch.default_config_file = str(folder / "there is no default")
    launch.has_device = lambda: True  # as on a machine with GPUs
    import fp8_backends.compute.native.backend
    import fp8_backends.compute.torchao.backend  # noqa: F401, as preparing a model does

    layer = torch.nn.Linear(16, 16)
    layer.weight.grad, layer.bias.grad = torch.ones(16, 16), torch.ones(16)
    torch.optim.AdamW(layer.parameters()).step()
    if deepspeed:
        import deepspeed as _  # noqa: F401
    gc.collect()
    gc.freeze()


def outcome(started: Started, output: str) -> dict:
    """Run the started command, and read the output of `trained.py`: {"ranks", "asked",
    "printed"}."""
    for file in Path(output).parent.glob(f"{Path(output).name}.*"):
        file.unlink()
    printed = run(started)
    files = sorted(Path(output).parent.glob(f"{Path(output).name}.*"))
    return {
        "ranks": [json.loads(file.read_text()) for file in files],
        "asked": started.ranks,
        "printed": printed,
    }


def run(started: Started) -> str:
    """Fork the processes, wait for them, and return their output."""
    files = [os.memfd_create("printed") for _ in range(started.ranks)]
    for rank, file in enumerate(files):
        if os.fork() == 0:
            os.dup2(file, 1)
            os.dup2(file, 2)
            _become(started, rank)
    for _ in files:
        os.wait()
    printed = "\n".join(os.pread(file, 1 << 16, 0).decode() for file in files)
    for file in files:
        os.close(file)
    return printed


def _become(started: Started, rank: int) -> None:
    """Execute this command and environment like the interpreter, in a fork. Never returns."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(started.environment)
        if started.agent is not None:  # it assigns the ranks
            size = str(started.ranks)
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size
            )
        program, *words = started.command
        assert program == sys.executable, started.command
        words = words[1:] if words[0] == "-u" else words
        for name in ("fp8_backends", launch.WORKER):
            sys.modules.pop(name, None)
        if "ACCELERATE_USE_FSDP" in os.environ:
            _ranks_as_on_gpus()
        if words[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0], sys.argv = str(Path(words[0]).parent), words
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ranks_as_on_gpus() -> None:
    """Give Accelerate the state of a machine with GPUs, with gloo between the ranks: it uses FSDP
    only on accelerators."""
    PartialState._prepare_backend = lambda self, *args, **kwargs: (
        "gloo",
        DistributedType.MULTI_GPU,
    )
