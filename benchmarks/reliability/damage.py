"""Load damaged checkpoints: each must be refused by name, and nothing of it loaded.

Checkpoints of small trainings are damaged in one file at a time: a zeroed tail, a flipped bit, a
part of the file, nothing of it, no file, or the same file of another step. Every kind of file takes
every damage, at random places. `load_state` must raise one `FP8BackendError` with the names of the
file and of the whole checkpoint next to it, and leave model, optimizer and scheduler unchanged;
`newest_checkpoint` must find the neighbour. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process with threads cannot be forked
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402
from measuring import cpu_features, table, write_json  # noqa: E402
from resumed_runs import BACKENDS, Failed, Run, forked, warm_up  # noqa: E402

import fp8_backends  # noqa: E402

MANIFEST = "fp8_manifest.json"


def zeroed_tail(data: bytes, rng: random.Random) -> bytes:
    kept = rng.randrange(len(data.rstrip(b"\0")))
    return data[:kept] + bytes(len(data) - kept)


def flipped_bit(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


CONTENTS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "zeroed tail": zeroed_tail,
    "flipped bit": flipped_bit,
    "truncated": lambda data, rng: data[: rng.randrange(1, len(data))],
    "emptied": lambda data, rng: b"",
}
DAMAGES = (*CONTENTS, "removed", "of another step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=3, help="over all files and damages, of each backend (3)"
    )
    parser.add_argument("--quick", action="store_true", help="one round of one backend")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write the record")
    args = parser.parse_args()
    began, found = time.perf_counter(), []
    warm_up()
    for backend in BACKENDS[:1] if args.quick else BACKENDS:
        outcomes = forked(lambda: damage_all(backend, 1 if args.quick else args.rounds, args.seed))  # noqa: B023
        if isinstance(outcomes, Failed):
            raise SystemExit(outcomes.text)
        found += [(backend, *outcome) for outcome in outcomes]
    files = Counter(kind for _, kind, *_ in found)
    failures = [
        f"{backend}: {kind}, {damage}: {wrong}" for backend, kind, damage, wrong in found if wrong
    ]
    refused = Counter(kind for _, kind, _, wrong in found if not wrong)
    print(
        table(
            ["file", "damaged", "refused by name"],
            [[kind, n, refused[kind]] for kind, n in files.items()],
        )
    )
    print(f"{len(found)} damaged checkpoints, {len(found) - len(failures)} refused")
    print("\n".join(failures))
    if args.out:
        results = [
            {"file": kind, "damaged": n, "refused": refused[kind]} for kind, n in files.items()
        ]
        record = {
            "seconds": round(time.perf_counter() - began),
            "damages": DAMAGES,
            "failures": failures,
        }
        write_json(
            str(args.out / f"damage_cpu_{cpu_features()}.json"), record | {"results": results}
        )
    return int(bool(failures))


def damage_all(backend: str, rounds: int, seed: int) -> list[tuple[str, str, str]]:
    """Damage every file in every way; yield the kind of file, the damage, and faults of the
    refusal."""
    rng, outcomes = random.Random(seed), []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(backend, Path(folder), anew=True)
        run.accelerator.register_for_checkpointing(
            torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        )
        for number in (1, 2, 3):
            run.step(number)
            run.save()
        older, newest = (Path(folder, "checkpoints", f"checkpoint_{n}") for n in (1, 2))
        shutil.copytree(newest, Path(folder, "kept"))
        before = state_of(run)
        for name in sorted(path.name for path in newest.iterdir()) * rounds:
            for damage in DAMAGES:
                if damage_file(newest / name, older / name, damage, rng):
                    outcomes.append(
                        (
                            re.sub(r"_\d+", "_N", name),
                            damage,
                            wrong_of(run, newest, older, name, before),
                        )
                    )
                    shutil.copy(Path(folder, "kept", name), newest / name)
        run.load(newest)  # the restored file is whole
    return outcomes


def damage_file(path: Path, other: Path, damage: str, rng: random.Random) -> bool:
    """Apply the damage, and tell if it changes the file."""
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
        return True
    changed = other.read_bytes() if damage == "of another step" else CONTENTS[damage](data, rng)
    path.write_bytes(changed)
    return changed != data


def wrong_of(run: Run, damaged: Path, older: Path, name: str, before: list) -> str:
    """Return faults in the handling of a damaged checkpoint; empty if there are none."""
    try:
        run.load(damaged)
    except fp8_backends.FP8BackendError as error:
        said = str(error)
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    else:
        return "loaded in silence"
    # a whole manifest of another step contradicts the files, and the wrong side is unknowable
    names = [name] if name != MANIFEST else [path.name for path in older.iterdir()]
    if not any(each in said for each in names) or str(older) not in said:
        return f"not named: {said}"
    if not same(before, state_of(run)):
        return "refused, and something was loaded"
    if fp8_backends.checkpoints.newest_checkpoint(damaged.parent) != str(older):
        return "newest_checkpoint does not find the one before"
    return ""


def state_of(run: Run) -> list:
    state = [run.model.state_dict(), run.optimizer.state_dict(), run.scheduler.state_dict()]
    return copy.deepcopy(state)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


if __name__ == "__main__":
    sys.exit(main())
