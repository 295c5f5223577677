"""Launch each kind of backend on every route, and every backend string on one of them, for
`test_routes.py`.

    python routes.py FOLDER [ROUTE …]

Prints one line of JSON for each route and backend: the files of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import forked_workers
from intercepted import Intercepted, Started, environment, free_port, ours, stocks, yaml_file
from torch.distributed import run as torchrun

HERE = Path(__file__).parent
SCRIPT = str(HERE / "trained.py")

COMPUTES = (
    "native:dynamic",
    "native:delayed",
    "native:rowwise",
    "native:blockwise",
    "native:mxfp8",
    "native:window",
)
COMPUTES += ("ao:tensorwise", "ao:rowwise", "ao:rowwise_with_gw_hp")
LEVELS = (
    "msamp:O1",
    "msamp:O2",
    "msamp:O3",
    "msamp:O4",
    "native:dynamic+msamp:O2",
    "native:delayed+msamp:O3",
)
ABSENT = ("te:delayed", "te+msamp:O3")
"""Valid names of uninstalled backends."""
MORE_ABSENT = ("te:dynamic", "te:blockwise", "te:mxfp8", "te+msamp:O1", "te:dynamic+msamp:O2")
"""More of them, for one route: whatever the name, it is refused at the same place."""
EACH_KIND = ("native:delayed", "ao:tensorwise", "msamp:O4", "native:delayed+msamp:O3", "te:delayed")
"""Routes treat all names alike."""


# The routes: (backend, output, folder) -> the started command


def launch_cpu(backend: str, output: str, folder: Path) -> Started:
    return ours("--cpu", "--fp8_backend", backend, SCRIPT, output, "--fp8_backend", "its own")


def launch_cpu_ranks(backend: str, output: str, folder: Path) -> Started:
    ranks = ("--cpu", "--num_processes", "2", "--main_process_port", free_port())
    return ours(*ranks, f"--fp8-backend={backend}", SCRIPT, output)


def launch_module(backend: str, output: str, folder: Path) -> Started:
    return ours("--cpu", "--fp8_backend", backend, "--module", "trained", output)


def launch_yaml(backend: str, output: str, folder: Path) -> Started:
    file = yaml_file(folder, mixed_precision="fp8", fp8_config={"backend": backend})
    return ours("--config_file", file, SCRIPT, output)


def launch_deepspeed(backend: str, output: str, folder: Path) -> Started:
    ranks = ("--use_deepspeed", "--num_processes", "2", "--main_process_port", free_port())
    return ours(*ranks, "--fp8_backend", backend, SCRIPT, output)


def deepspeed_file(folder: Path) -> str:
    file = folder / "deepspeed.json"
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 16})
    )
    return str(file)


def launch_deepspeed_file(backend: str, output: str, folder: Path) -> Started:
    ranks = ("--use_deepspeed", "--num_processes", "2", "--main_process_port", free_port())
    return ours(
        *ranks,
        "--deepspeed_config_file",
        deepspeed_file(folder),
        "--fp8_backend",
        backend,
        SCRIPT,
        output,
    )


def accelerate_launch_deepspeed(backend: str, output: str, folder: Path) -> Started:
    engine = {"distributed_type": "DEEPSPEED", "use_cpu": False, "num_processes": 2}
    engine["deepspeed_config"] = {"deepspeed_config_file": deepspeed_file(folder)}
    file = yaml_file(folder, fp8_config={"backend": backend}, **engine)
    precision = ("--mixed_precision", "fp8")  # refused beside that file if the YAML says it
    return stocks(
        "--config_file",
        file,
        *precision,
        "--main_process_port",
        free_port(),
        SCRIPT,
        output,
        "--import",
    )


def launch_fsdp2(backend: str, output: str, folder: Path) -> Started:
    ranks = ("--use_fsdp", "--num_processes", "2", "--main_process_port", free_port())
    fsdp = (
        "--fsdp_version",
        "2",
        "--fsdp_auto_wrap_policy",
        "NO_WRAP",
        "--fsdp_cpu_ram_efficient_loading",
        "false",
    )
    return ours(*ranks, *fsdp, "--fp8_backend", backend, SCRIPT, output)


def accelerate_launch(backend: str, output: str, folder: Path) -> Started:
    file = yaml_file(folder, mixed_precision="fp8", fp8_config={"backend": backend})
    return stocks("--config_file", file, SCRIPT, output, "--import")


def accelerate_launch_ranks(backend: str, output: str, folder: Path) -> Started:
    file = yaml_file(folder, mixed_precision="fp8", fp8_config={"backend": backend})
    ranks = ("--multi_gpu", "--num_processes", "2", "--main_process_port", free_port())
    with environment(ACCELERATE_USE_CPU="true"):
        return stocks("--config_file", file, *ranks, SCRIPT, output, "--import")


def by_hand(backend: str) -> dict[str, str]:
    return {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_FP8_BACKEND": backend,
    }


def plain_python(backend: str, output: str, folder: Path) -> Started:
    return Started([sys.executable, SCRIPT, output, "--import"], {**os.environ, **by_hand(backend)})


def notebook(backend: str, output: str, folder: Path) -> Started:
    return Started(
        [sys.executable, str(HERE / "notebook.py"), output], {**os.environ, **by_hand(backend)}
    )


def torchrun_worker(backend: str, output: str, folder: Path) -> Started:
    """Start one rank in a process group; `test_launch_for_real.py` starts two."""
    ranks = ("--nproc_per_node", "1", "--master_port", free_port())
    with environment(**by_hand(backend)), Intercepted() as intercepted:
        torchrun.main([*ranks, "-m", "fp8_backends.accelerate_plugin.worker", SCRIPT, output])
    return intercepted.started[0]


ROUTES: dict[str, Callable[[str, str, Path], Started]] = {
    "fp8-backends launch --cpu": launch_cpu,
    "fp8-backends launch -m": launch_module,
    "fp8-backends launch --config_file": launch_yaml,
    "accelerate launch": accelerate_launch,
    "python": plain_python,
    "notebook_launcher": notebook,
    "fp8-backends launch --cpu --num_processes 2": launch_cpu_ranks,
    "fp8-backends launch --use_fsdp": launch_fsdp2,
    "fp8-backends launch --use_deepspeed": launch_deepspeed,
    "fp8-backends launch --deepspeed_config_file": launch_deepspeed_file,
    "accelerate launch --multi_gpu": accelerate_launch_ranks,
    "accelerate launch, DEEPSPEED": accelerate_launch_deepspeed,
    "torchrun -m worker": torchrun_worker,
}


def backends_of(route: str) -> tuple[str, ...]:
    if route == "fp8-backends launch --cpu":
        return (*COMPUTES, *LEVELS, *ABSENT, *MORE_ABSENT)
    return (*EACH_KIND, "msamp:O2") if "deepspeed" in route.lower() else EACH_KIND


def main(folder: str, *routes: str) -> None:
    os.chdir(HERE)
    forked_workers.prepare(
        Path(folder), deepspeed=any("deepspeed" in route.lower() for route in routes)
    )
    output = str(Path(folder) / "output")
    for route in routes or ROUTES:
        for backend in backends_of(route):
            try:
                result = forked_workers.outcome(
                    ROUTES[route](backend, output, Path(folder)), output
                )
            except BaseException:
                result = {"ranks": [], "asked": 0, "printed": traceback.format_exc()}
            print(json.dumps({"route": route, "backend": backend, **result}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
