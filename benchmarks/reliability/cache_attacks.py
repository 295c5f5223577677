"""Attack the compiled optimizer step of a CPU: foreign code in its cache, damaged libraries,
threads and processes at first use, compilers with arguments, killed processes, full disks.

    python benchmarks/reliability/cache_attacks.py [--quick] [--only TEXT] [--out FOLDER]

Each trial is a process that takes one step of Adam by the compiled kernel, and compares it with
PyTorch's operations. An attack succeeds if foreign code runs, the process dies, its step differs in
a bit, the kernel is not compiled though it could be, or a message or a compilation repeats. Exits
with 1 if any succeeds. Attacks that need further rights are not tried, and listed so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from measuring import cpu_features, table, write_json

from fp8_backends.kernels import adam_cpu as cpu
from fp8_backends.kernels.adam import AdamSteps, Job, Slot, adam_hyper

ANOTHER_USER = 12345
_NEW_MOUNTS, _NEW_PIDS = 0x00020000, 0x20000000
_NO_EXEC, _PRIVATE, _RECURSIVE = 8, 1 << 18, 1 << 14


class NotTried(Exception):
    """Signal an attack that needs further rights."""


class Result(NamedTuple):
    attack: str
    trials: int
    succeeded: int
    note: str = ""


# Steps


def job() -> Job:
    made = torch.Generator().manual_seed(0)
    weight, grad, exp_avg, exp_avg_sq = (Slot(torch.rand(1000, generator=made)) for _ in range(4))
    hyper = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.1, torch.tensor(3.0), "cpu")
    options = {"decoupled": True, "maximize": False, "rounding": "stochastic", "seed": 1}
    return Job(weight, grad, exp_avg, exp_avg_sq, hyper, **options)


def step() -> dict:
    """Take one step; return if the kernel made it, if it matches PyTorch's bits, and the
    warnings."""
    ours, expected = job(), job()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        is_compiled = cpu.kernels(ours.kind) is not None
        AdamSteps([ours]).run()
    AdamSteps([expected], fused=False).run()
    same = all(torch.equal(a.data, b.data) for a, b in zip(ours.slots, expected.slots, strict=True))
    return {"compiled": is_compiled, "same": same, "warnings": [str(each.message) for each in seen]}


def steps_of_threads(count: int) -> list[dict]:
    barrier, results = threading.Barrier(count), []

    def run() -> None:
        barrier.wait()
        results.append(step())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Child:
    """Fork from this process, which has imported everything."""

    def __init__(
        self,
        function: Callable[[], object],
        environment: dict[str, str],
        folder: Path | None = None,
    ):
        read, write = os.pipe()
        self.pid, self._read = os.fork(), read
        if not self.pid:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                os.environ.update(environment)
                tempfile.tempdir = None  # the choice of this one
                if folder is not None:
                    os.chdir(folder)
                with open(write, "w") as answer:
                    answer.write(json.dumps(function()))
                status = 0
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            finally:
                sys.stdout.flush()
                os._exit(status)
        os.close(write)

    def answer(self) -> object:
        """Return the function's result; None if the process died."""
        with open(self._read) as text:
            answer = text.read()
        _, status = os.waitpid(self.pid, 0)
        return json.loads(answer) if status == 0 else None


def is_wrong(answer: object, compiled: bool = True, most_warnings: int = 0) -> bool:
    return not (
        isinstance(answer, dict)
        and answer["same"]
        and answer["compiled"] == compiled
        and len(answer["warnings"]) <= most_warnings
    )


# Parts of attacks


class Place:
    """Provide a folder with a home, a fast compiler, and foreign code that leaves a trace."""

    def __init__(self, folder: Path):
        self.folder, self.trace, self.log = folder, folder / "trace", folder / "log"
        self.good, self.evil = folder / "good.so", folder / "evil.so"
        self._count = 0
        source = folder / "evil.cpp"
        source.write_text(
            "#include <cstdio>\n__attribute__((constructor)) static void run() "
            f'{{ if (FILE* f = fopen("{self.trace}", "w")) fclose(f); }}\n'
        )
        subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(self.evil)], check=True)
        self.compiler = self.write_compiler("copies", f"cp {self.good} $target")
        home = self.home()
        answer = Child(step, self.environment(home, compiler="g++")).answer()
        if is_wrong(answer):
            raise SystemExit(
                f"the step is not compiled, so that there is nothing to attack: {answer}"
            )
        (library,) = (home / "fp8_backends").glob("*.so")
        shutil.copy(library, self.good)
        home = self.home()
        Child(step, self.environment(home)).answer()
        (library,) = (home / "fp8_backends").glob("*.so")
        self.name = library.name
        """Path of the library of the copying compiler."""

    def write_compiler(self, name: str, line: str) -> Path:
        """Write a compiler that logs its call, and then runs this on `$target`."""
        script = self.folder / name
        find = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && target=$2; shift; done'
        script.write_text(f'#!/bin/sh\necho compiled >> {self.log}\nall="$*"\n{find}\n{line}\n')
        script.chmod(0o755)
        return script

    def home(self) -> Path:
        self._count += 1
        home = self.folder / f"home{self._count}"
        home.mkdir(0o700)
        return home

    def environment(self, home: Path | str, compiler: Path | str | None = None) -> dict[str, str]:
        return {
            "XDG_CACHE_HOME": str(home),
            "HOME": str(self.folder),
            "CXX": str(compiler or self.compiler),
        }

    def evil_name(self) -> str:
        """Return the file name at which foreign code would be loaded."""
        stem, _, digest = self.name.removesuffix(".so").rpartition("-")
        named_by_content = len(digest) == 64
        return (
            f"{stem}-{hashlib.sha256(self.evil.read_bytes()).hexdigest()}.so"
            if named_by_content
            else self.name
        )

    def plant(self, cache: Path) -> Path:
        """Put foreign code into a new cache folder."""
        cache.mkdir(exist_ok=True, parents=True)
        planted = cache / self.evil_name()
        shutil.copy(self.evil, planted)
        planted.chmod(0o700)
        return planted

    def foreign_code_ran(self) -> bool:
        ran = self.trace.exists()
        self.trace.unlink(missing_ok=True)
        return ran

    def compilations(self) -> int:
        count = len(self.log.read_text().splitlines()) if self.log.exists() else 0
        self.log.unlink(missing_ok=True)
        return count


def need_root() -> None:
    if os.geteuid():
        raise NotTried("root alone can make files of another user")


def give(*paths: Path) -> None:
    need_root()
    for path in paths:
        os.chown(path, ANOTHER_USER, ANOTHER_USER, follow_symlinks=False)


# Attacks: each yields its success for every trial


def code_in_a_cache_that_others_may_write(place: Place) -> Iterator[bool]:
    need_root()
    home = place.home()
    give(place.plant(home / "fp8_backends"))
    (home / "fp8_backends").chmod(0o777)
    yield is_wrong(Child(step, place.environment(home)).answer()) or place.foreign_code_ran()
    yield (home / "fp8_backends").stat().st_mode & 0o777 != 0o700


def code_in_a_cache_of_another_user(place: Place) -> Iterator[bool]:
    need_root()
    home = place.home()
    give(place.plant(home / "fp8_backends"), home / "fp8_backends")
    yield (
        is_wrong(Child(step, place.environment(home)).answer(), most_warnings=1)
        or place.foreign_code_ran()
    )


def code_below_a_folder_of_another_user(place: Place) -> Iterator[bool]:
    need_root()
    above = place.home()
    place.plant(above / "cache" / "fp8_backends")
    give(above)
    yield is_wrong(Child(step, place.environment(above / "cache")).answer(), most_warnings=1)
    yield place.foreign_code_ran()


def code_below_a_folder_that_others_may_write(place: Place) -> Iterator[bool]:
    need_root()
    for mode, group in ((0o777, -1), (0o770, ANOTHER_USER)):  # a user's own group may be private
        above = place.home()
        place.plant(above / "cache" / "fp8_backends")
        os.chown(above, -1, group)
        above.chmod(mode)
        yield is_wrong(Child(step, place.environment(above / "cache")).answer(), most_warnings=1)
        yield place.foreign_code_ran()


def a_link_in_place_of_the_cache(place: Place) -> Iterator[bool]:
    home, elsewhere = place.home(), place.home()
    place.plant(elsewhere)
    (home / "fp8_backends").symlink_to(elsewhere)
    yield (
        is_wrong(Child(step, place.environment(home)).answer(), most_warnings=1)
        or place.foreign_code_ran()
    )


def a_link_in_place_of_the_library(place: Place) -> Iterator[bool]:
    for link in (os.symlink, os.link):
        home = place.home()
        planted = place.plant(home / "fp8_backends")
        planted.unlink()
        link(place.evil, planted)
        yield is_wrong(Child(step, place.environment(home)).answer()) or place.foreign_code_ran()


def a_relative_cache_folder(place: Place) -> Iterator[bool]:
    for name in ("cache", ".", "./cache", "../current/cache"):
        current = place.home() / "current"
        place.plant(current / name / "fp8_backends")
        environment = place.environment(name) | {"HOME": str(place.home())}
        yield is_wrong(Child(step, environment, current).answer()) or place.foreign_code_ran()


def damaged(place: Place, contents: list[bytes]) -> Iterator[bool]:
    for content in contents:
        home = place.home()
        cache = home / "fp8_backends"
        cache.mkdir(0o700)
        (cache / place.name).write_bytes(content)
        (cache / place.name).chmod(0o600)
        yield is_wrong(Child(step, place.environment(home)).answer()) or place.foreign_code_ran()


def half_written_libraries(place: Place, count: int) -> Iterator[bool]:
    whole = place.good.read_bytes()
    yield from damaged(place, [whole[: len(whole) * i // count] for i in range(count)])


def flipped_bytes(place: Place, count: int) -> Iterator[bool]:
    whole = place.good.read_bytes()
    flipped = []
    for i in range(count):
        content = bytearray(whole)
        content[len(whole) * i // count + 5] ^= 0xFF
        flipped.append(bytes(content))
    yield from damaged(place, flipped)


def threads_at_first_use(place: Place, count: int) -> Iterator[bool]:
    slow = place.write_compiler("slow", f"sleep 0.3; cp {place.good} $target")
    answer = Child(lambda: steps_of_threads(count), place.environment(place.home(), slow)).answer()
    for each in answer or [None] * count:
        yield is_wrong(each)
    yield place.compilations() != 1


def a_thread_whose_compilation_fails(place: Place) -> Iterator[bool]:
    """The first call of the compiler fails; other threads and other processes have their
    kernels."""
    once = place.folder / "failed once"
    fails = place.write_compiler(
        "fails", f'[ -d "{once}" ] || {{ mkdir "{once}"; kill -9 $$; }}; cp {place.good} $target'
    )
    home = place.home()
    for each in (
        Child(lambda: steps_of_threads(4), place.environment(home, fails)).answer() or [None] * 4
    ):
        yield is_wrong(each)
    yield is_wrong(Child(step, place.environment(home, fails)).answer())


def in_new_pids(function: Callable[[], object]) -> object:
    """Return the function's result from a process with number 1."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_PIDS):
        return "not permitted"
    return Child(lambda: function() if os.getpid() == 1 else None, {}).answer()


def processes(place: Place, count: int, function: Callable[[], object]) -> Iterator[bool]:
    environment = place.environment(place.home(), place.write_compiler("counted", "exec g++ $all"))
    children = [Child(function, environment) for _ in range(count)]
    answers = [child.answer() for child in children]
    if "not permitted" in answers:
        raise NotTried("this user cannot give processes numbers of their own")
    yield from (is_wrong(answer) for answer in answers)


def processes_of_equal_number_at_first_use(place: Place, count: int) -> Iterator[bool]:
    yield from processes(place, count, lambda: in_new_pids(step))
    yield place.compilations() != 1


def processes_where_files_cannot_be_locked(place: Place, count: int) -> Iterator[bool]:
    """Replace `flock` of the C library: it answers like a file system without locks."""

    def unlocked() -> dict:
        def flock(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        fcntl.flock = flock
        return step()

    yield from processes(
        place, count, lambda: in_new_pids(unlocked) if os.geteuid() == 0 else unlocked()
    )
    place.compilations()


def compilers_with_arguments(place: Place) -> Iterator[bool]:
    folder = place.folder / "with space"
    folder.mkdir()
    (folder / "g++").symlink_to(place.compiler)
    for command in (
        "g++ -O2",
        f"env X=1 {place.compiler}",
        f"  {place.compiler} ",
        folder / "g++",
        f"'{folder}/g++' -O2",
    ):
        yield is_wrong(Child(step, place.environment(place.home(), command)).answer())
    yield is_wrong(
        Child(step, place.environment(place.home(), "'g++ -O2")).answer(), False, most_warnings=1
    )


def processes_killed_while_they_compile(place: Place, count: int) -> Iterator[bool]:
    for i in range(count):
        half = place.write_compiler(
            "half", f"head -c 9000 {place.good} > $target; sleep 0.4; cp {place.good} $target"
        )
        home = place.home()
        child = Child(step, place.environment(home, half))
        time.sleep(0.05 + 0.4 * i / count)
        os.kill(child.pid, signal.SIGKILL)
        child.answer()
        start = time.monotonic()
        yield (
            is_wrong(Child(step, place.environment(home, half)).answer())
            or time.monotonic() - start > 60
        )
    place.compilations()


def a_lock_that_is_never_released(place: Place) -> Iterator[bool]:
    """Hold the lock in a process forked while its parent compiles, and outliving it; the wait is
    shortened."""
    home = place.home()
    Child(step, place.environment(home)).answer()
    (library,) = (home / "fp8_backends").glob("*.so")
    (lock,) = (home / "fp8_backends").glob("*.lock")
    library.unlink()

    def soon() -> dict:
        with contextlib.suppress(ImportError):
            from fp8_backends.kernels import adam_cpu as cpu_library

            cpu_library.LONGEST_WAIT = 1
        return step()

    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield is_wrong(Child(soon, place.environment(home)).answer())


def in_mount(
    folder: Path, flags: int, options: str, function: Callable[[], object]
) -> Callable[[], object]:
    """Run the function in a process with a separate disk mounted at this folder."""

    def run() -> object:
        library = ctypes.CDLL(None, use_errno=True)
        if library.unshare(_NEW_MOUNTS) or library.mount(
            b"none", b"/", None, _RECURSIVE | _PRIVATE, None
        ):
            return "not permitted"
        if library.mount(b"tmpfs", bytes(folder), b"tmpfs", flags, options.encode()):
            return "not permitted"
        return function()

    return run


def permitted(answer: object) -> object:
    if answer == "not permitted":
        raise NotTried("this user cannot mount a disk")
    return answer


def a_home_that_cannot_be_written(place: Place) -> Iterator[bool]:
    for home in ("/proc/home", "/dev/null"):
        yield is_wrong(Child(step, place.environment(home)).answer(), most_warnings=1)
    for home in (".", "none"):
        yield is_wrong(
            Child(step, place.environment("") | {"HOME": home}, place.home()).answer(),
            most_warnings=1,
        )


def a_full_disk(place: Place) -> Iterator[bool]:
    home = place.home()
    run = in_mount(home, 0, "size=8k,mode=0700", step)
    yield is_wrong(permitted(Child(run, place.environment(home)).answer()), most_warnings=1)
    yield is_wrong(permitted(Child(run, place.environment(home, "g++")).answer()), most_warnings=1)


def a_disk_from_which_nothing_may_run(place: Place) -> Iterator[bool]:
    home = place.home()
    run = in_mount(home, _NO_EXEC, "mode=0700", step)
    yield is_wrong(permitted(Child(run, place.environment(home)).answer()), most_warnings=1)
    # and no other folder either: the step is slower, and one warning names the fix
    answer = permitted(Child(run, place.environment(home) | {"TMPDIR": str(home)}).answer())
    yield is_wrong(answer, False, most_warnings=1) or "XDG_CACHE_HOME" not in answer["warnings"][0]


def attacks(is_quick: bool) -> list[tuple[Callable, ...]]:
    some, many = (3, 4) if is_quick else (24, 20)
    return [
        (code_in_a_cache_that_others_may_write,),
        (code_in_a_cache_of_another_user,),
        (code_below_a_folder_of_another_user,),
        (code_below_a_folder_that_others_may_write,),
        (a_link_in_place_of_the_cache,),
        (a_link_in_place_of_the_library,),
        (a_relative_cache_folder,),
        (half_written_libraries, some),
        (flipped_bytes, some),
        (threads_at_first_use, 8),
        (a_thread_whose_compilation_fails,),
        (processes_of_equal_number_at_first_use, many),
        (processes_where_files_cannot_be_locked, many // 4),
        (compilers_with_arguments,),
        (processes_killed_while_they_compile, some // 3),
        (a_lock_that_is_never_released,),
        (a_home_that_cannot_be_written,),
        (a_full_disk,),
        (a_disk_from_which_nothing_may_run,),
    ]


def name(attack: Callable) -> str:
    return attack.__name__.replace("_", " ")


def tried(place: Place, attack: Callable, *arguments: int) -> Result:
    place.compilations(), place.foreign_code_ran()
    try:
        outcomes = list(attack(place, *arguments))
    except NotTried as error:
        return Result(name(attack), 0, 0, f"not tried: {error}")
    return Result(name(attack), len(outcomes), sum(outcomes))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer lengths, places and processes")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="attacks with this text in their name"
    )
    parser.add_argument("--out", type=Path, help="folder for the record")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # processes are forked from this one, so it starts no threads
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder).resolve())
        results = [
            tried(place, *each)
            for each in attacks(arguments.quick)
            if arguments.only in name(each[0])
        ]
    seconds = time.monotonic() - start
    print(table(["attack", "trials", "succeeded", ""], [list(each) for each in results]))
    succeeded = sum(each.succeeded for each in results)
    print(
        f"{succeeded} of {sum(each.trials for each in results)} trials succeeded, in {seconds:.0f} "
        "s"
    )
    if arguments.out:
        record = {
            "question": "attacks on the cache of compiled code",
            "attacks": [each._asdict() for each in results],
        }
        path = arguments.out / f"cache_attacks_cpu_{cpu_features()}.json"
        write_json(str(path), {**record, "seconds": seconds})
    if succeeded:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
