"""Run launchers, ours and Accelerate's, up to the start of a process and no further."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml


class Started(NamedTuple):
    """Hold a launcher's command."""

    command: list[str]
    environment: dict[str, str]
    ranks: int = 1
    agent: object = None
    """The configuration of torchrun's agent, if it starts the ranks."""


class Intercepted:
    """Stop launchers from starting anything: neither by `subprocess.Popen` nor by
    `torch.distributed.run.run`."""

    def __init__(self) -> None:
        self.started: list[Started] = []

    def __enter__(self) -> Intercepted:
        import accelerate.commands.launch as stock
        import torch.distributed.run as torchrun

        self.undo = contextlib.ExitStack()
        for module, name in ((stock, "subprocess"), (torchrun, "run")):
            self.undo.callback(setattr, module, name, getattr(module, name))
        stock.subprocess = types.SimpleNamespace(
            Popen=self._popen, CalledProcessError=subprocess.CalledProcessError
        )
        torchrun.run = self._run
        return self

    def __exit__(self, *exc) -> None:
        self.undo.close()

    def _popen(self, command, env):
        self.started.append(Started(list(command), dict(env)))
        return types.SimpleNamespace(wait=lambda: 0, returncode=0)

    def _run(self, args):
        from torch.distributed.run import config_from_args

        agent, program, arguments = config_from_args(args)
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(args.master_port),
        }
        self.started.append(
            Started([program, *arguments], environment, agent.nproc_per_node, agent)
        )


def ours(*arguments: str) -> Started:
    """Return the command of `fp8-backends launch` with these arguments, or raise its error."""
    from fp8_backends.accelerate_plugin import launch

    with Intercepted() as intercepted:
        assert launch.run(arguments) == 0
    (started,) = intercepted.started
    return started


def stocks(*arguments: str) -> Started:
    """Return the command of `accelerate launch` with these arguments."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    with Intercepted() as intercepted:
        launch_command(launch_command_parser().parse_args(arguments))
    (started,) = intercepted.started
    return started


def yaml_file(folder: Path, **values) -> str:
    """A configuration file of Accelerate, for one process on the CPU unless the values say
    otherwise."""
    file = folder / "config.yaml"
    base = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "use_cpu": True,
        "num_processes": 1,
    }
    file.write_text(yaml.safe_dump(base | {"num_machines": 1} | values))
    return str(file)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    saved = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def free_port() -> str:
    """Return a port below Linux's ephemeral ports."""
    while True:
        port = random.SystemRandom().choice(range(15000, 32000))
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return str(port)
