"""Fuzz inputs: bad ones must end in an error of this package, and no field may be ignored.

Seeded cases of `fuzz_cases.py` run in this process: backend strings, recipes, the environment,
configuration files, commands, and calls of public functions. Each either works or is refused by a
message of at most 2,000 characters with the fault's name. Accepted input must keep its meaning:
every field is in the recipe, and the recipe survives a file, the environment, flags, a pickle.
Anything else is a fault, and exit code 1.

    benchmarks/reliability/fuzz.py --cases 10000 --seed 1
    benchmarks/reliability/fuzz.py --replay '{"area": "strings", "text": "native::"}'
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import logging
import os
import resource
import shlex
import signal
import sys
import tempfile
import time
import traceback
import types
import urllib.parse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["HF_HUB_OFFLINE"] = "1"

import accelerate.utils  # noqa: E402
import fuzz_cases  # noqa: E402
import yaml  # noqa: E402
from accelerate.commands import launch as accelerate_launch  # noqa: E402
from fuzz_cases import Case, decoded  # noqa: E402
from fuzz_oracle import BACKENDS, Ignored, check_round_trips, check_seen, means, short  # noqa: E402
from measuring import cpu_features, table, write_json  # noqa: E402

import fp8_backends  # noqa: E402
from fp8_backends import (  # noqa: E402
    FP8BackendError,
    FP8RecipeKwargs,
    preparation,  # noqa: E402
    resolve,
)
from fp8_backends.accelerate_plugin import launch  # noqa: E402
from fp8_backends.compute import registry  # noqa: E402
from fp8_backends.convert import stored_weights  # noqa: E402
from fp8_backends.recipes.fields import FIELDS  # noqa: E402
from fp8_backends.recipes.handlers import code_over_launch, from_environment  # noqa: E402
from fp8_backends.recipes.sources import LAUNCHED, NAMES, PREFIX, environment_source  # noqa: E402
from fp8_backends.tools import config, main  # noqa: E402
from fp8_backends.tools.estimate import Workload, estimate  # noqa: E402
from fp8_backends.words import shortened  # noqa: E402

LONGEST = 2000
"""Characters of a message."""
SECONDS = 2.0
"""CPU seconds of a case. A longer one hangs; so does one that waits 15 times as long."""
_ALARMS = (signal.SIGVTALRM, signal.SIGALRM)
OUTCOMES = ("worked", "refused", "internal", "unclear", "ignored")
"""An `internal` error is any from elsewhere, or a hang; an `unclear` refusal is too long, or names
nothing of the input; `ignored` is accepted input missing in the recipe."""


class Unclear(AssertionError):
    """Signal an unhelpful refusal."""


class Hang(BaseException):
    """Raised by the alarm. No handler of the package catches it."""


class Result(NamedTuple):
    outcome: str
    message: str


# One case of each area


def run_strings(case: Case) -> None:
    head = case["text"].strip().lower().partition("+")[0].partition(":")[0]
    recipe = named(resolve, (case["text"],), case["text"], BACKENDS.get(head, head))
    if case["text"].strip().lower() != "auto":
        check_seen(recipe, {"backend": case["text"]})
    if resolve(recipe.name) != recipe:
        raise Ignored(f"{case['text']!r} and its name {recipe.name} differ")


def run_recipes(case: Case) -> None:
    fields = decoded(case["fields"])
    origin, _, name = case["handler"].rpartition(".")
    if origin == "accelerate":
        # its own __init__ needs its library
        handler = object.__new__(getattr(accelerate.utils, name))
        handler.__dict__.update(fields)
    elif origin == "te":
        handler = type(name, (), {"fp8_format": "HYBRID"})()
        handler.__dict__.update(fields)
    if origin:
        return named(resolve, (handler,), *fields, name)
    make = resolve if name == "dict" else lambda found: getattr(fp8_backends, name)(**found)
    theirs = [NAMES[field][0].name for field in fields if field in NAMES]
    recipe = named(make, (fields,), *fields, *theirs, fields.get("backend"), name, "ao:")
    if recipe.backend is not None or name != "dict":  # else auto has chosen
        check_seen(
            recipe,
            {
                field: value
                for field, value in fields.items()
                if (field, value) != ("backend", "auto")
            },
        )
        if recipe.compute != "auto":
            check_round_trips(recipe)


def run_environment(case: Case) -> None:
    variables = case["variables"]
    with changed_environment(variables):
        if LAUNCHED not in variables and not any(
            name.upper().startswith(PREFIX) for name in variables
        ):
            args = launch.parse(["--cpu", "--num_processes", "2", __file__])
            configuration = launch.Configuration()
            launch._check_launcher(args, configuration)
            return launch._wants_cpu_ranks(args, configuration)
        fields = [
            fuzz_cases.FIELD_OF_SUFFIX.get(name.upper().removeprefix(PREFIX)) for name in variables
        ]
        names = [*variables, *map(str.upper, variables), *fields]  # variables are read in any case
        recipe = named(
            from_environment,
            (),
            *names,
            *variables.values(),
            "OVERRIDE",
            "OPT_LEVEL",
            LAUNCHED,
            "ao:",
        )
        with contextlib.suppress(FP8BackendError):
            code_over_launch(FP8RecipeKwargs(backend="native:delayed"), environment_source())
    if recipe is not None and LAUNCHED in variables:
        text = variables[LAUNCHED]
        given = json.loads(urllib.parse.unquote(text) if text.startswith("%7B") else text)
        check_seen(
            recipe, {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        )
    elif recipe is not None:
        check_seen(
            recipe,
            {
                n: text
                for n, text in zip(fields, variables.values(), strict=True)
                if is_given(n, text)
            },
        )


def is_given(name: str | None, text: str) -> bool:
    """Tell if a variable is set: nonempty, and no default of Accelerate's launcher."""
    if name is None or not text.strip() or (name, text.strip().lower()) == ("backend", "no"):
        return False
    return FIELDS[name].parsed(text) not in {
        variable.launcher_default for variable in FIELDS[name].variables
    }


def run_files(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(case, Path(folder))
        status, out, error = run_command(["config", str(path), *case["arguments"]])
        if status == 2 and path.name not in error and not case["arguments"]:
            raise Unclear(f"does not name the file: {error[-300:]}")
        arguments = launch.parse(["--config_file", str(path), __file__])
        fields: dict[str, Any] = {}
        try:
            fields = launch.recipe_fields(
                arguments, launch._configuration(arguments, accelerate_launch)
            )
        except FP8BackendError as failure:
            check_length(failure)
        if status == 2:
            raise FP8BackendError(error)
        if {"--json", "--backend", "--check"} & {*case["arguments"]}:
            return
        asked, again = config.read(str(path), *_system(case)), Path(folder, "again.yaml")
        again.write_text(out, encoding="utf-8")
        same = config.read(str(again), "accelerate")
        if asked.recipe and means(asked.recipe) != (same.recipe and means(same.recipe)):
            raise Ignored(f"{asked.recipe!r} is written as {same.recipe!r}")
        if (
            fields
            and asked.recipe is not None
            and means(FP8RecipeKwargs(**fields)) != means(asked.recipe)
        ):
            raise Ignored(f"config reads {asked.recipe!r}, launch {FP8RecipeKwargs(**fields)!r}")
        if asked.system == "accelerate" and asked.recipe is not None:
            check_block(yaml.safe_load(path.read_bytes()).get("fp8_config") or {}, asked)


def _system(case: Case) -> list[str]:
    words = case["arguments"]
    return [words[words.index("--from") + 1]] if "--from" in words else []


def check_block(block: dict, asked: config.TrainingConfig) -> None:
    """Every key of an fp8_config is in the recipe, a default of Accelerate's, or noted."""
    for key, value in block.items():
        suffix = str(key).strip().lower().removeprefix("fp8_").upper()
        name = fuzz_cases.FIELD_OF_SUFFIX[suffix]
        defaults = [
            v
            for each in FIELDS[name].variables
            for v in (each.launcher_default, each.question_default)
        ]
        if value is None or (name == "backend" and str(value).strip().upper() in ("", "NO")):
            continue
        if FIELDS[name].parsed(value) not in defaults and name not in " ".join(asked.notes):
            check_seen(asked.recipe, {name: value})


def written(case: Case, folder: Path) -> Path:
    """Write the file of a case, or another object in its place."""
    kind, path = case["kind"], folder / "c.yaml"
    if kind.startswith("/dev/"):
        return Path(kind)
    if kind == "directory":
        path.mkdir()
    elif kind in ("broken link", "link to itself"):
        path.symlink_to(folder / "nothing" if kind == "broken link" else path)
    elif kind != "missing":
        path = path if kind == "unreadable" else folder / kind
        path.write_bytes(
            case["content"].encode(
                case.get("encoding", "utf-8"),
                "replace" if case.get("encoding") else "surrogatepass",
            )
        )
        path.chmod(0 if kind == "unreadable" else 0o600)
    return path


def run_commands(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in case.get("files", {}).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
        before = os.getcwd()
        os.chdir(folder)
        try:
            status, _, error = run_command(case["argv"])
        finally:
            os.chdir(before)
    if status:
        raise FP8BackendError(error)


def run_command(argv: list[str]) -> tuple[int, str, str]:
    """Return the exit status and the output of a command, encoded as on a terminal."""
    out, error = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main.main(argv)
        except SystemExit as ended:
            status = ended.code or 0
    out.flush(), error.flush()
    said, complaint = (stream.buffer.getvalue().decode() for stream in (out, error))
    if status not in (0, 1, 2):
        raise AssertionError(f"exit status {status}")
    if status == 2:
        if "Traceback" in complaint or not complaint:
            raise AssertionError(f"no message: {complaint[-500:]}")
        if len(complaint.partition("error: ")[2] or complaint) > LONGEST:
            raise Unclear(f"{len(complaint)} characters: {complaint[:300]}")
    return status, said, complaint


def run_functions(case: Case) -> None:
    arguments = decoded(case["fields"])
    names = [*arguments, "spec", "backend", "model", "optimizer"]
    spec = arguments.get("spec")
    names += spec if isinstance(spec, dict) else [spec]
    names += ["te:delayed"] if arguments.get("use_te") else []
    if case["function"] == "estimate":
        backends, shardings = arguments.pop("backends"), arguments.pop("shardings")
        return named(
            lambda: estimate(Workload(model=_shape(), **arguments), backends, shardings), (), *names
        )
    before = [{**found} for found in (registry.factories, registry.instances)]
    try:
        function = next(
            getattr(place, case["function"]) for place in PLACES if hasattr(place, case["function"])
        )
        found = named(lambda: _called(function, arguments), (), *names)
        if case["function"] == "register_backend":
            named(resolve, (arguments["name"].lower(),), "backend")
        return found
    finally:
        for registered, held in zip((registry.factories, registry.instances), before, strict=True):
            registered.clear()
            registered.update(held)


def _called(function: Any, arguments: dict[str, Any]) -> Any:
    found = function(**arguments)
    if hasattr(found, "__enter__"):
        with found:
            return None
    return found


def _shape() -> Any:
    from fp8_backends.tools.estimate.model_shapes import from_parameters

    return from_parameters(20e6)


def named(function: Any, arguments: tuple, *words: Any) -> Any:
    """Return the function's result. A refusal must be short, and name one of these words."""
    try:
        return function(*arguments)
    except FP8BackendError as error:
        check_length(error)
        said = str(error)
        spelled = [
            form
            for word in words
            if isinstance(word, str)
            for form in (word, repr(word)[1:-1], word.replace("-", "_"))
        ]
        if spelled and not any(word[:20].rstrip("s") in said for word in spelled):
            raise Unclear(f"names none of {', '.join(map(short, words))}: {said[:300]}") from None
        raise


def check_length(error: Exception) -> None:
    if len(str(error)) > LONGEST:
        raise Unclear(f"{len(str(error))} characters: {str(error)[:300]}") from None


@contextlib.contextmanager
def changed_environment(variables: dict[str, str]) -> Iterator[None]:
    saved = dict(os.environ)
    try:
        os.environ.update(
            {
                name.replace("=", ""): text
                for name, text in variables.items()
                if name.replace("=", "")
            }
        )
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


# All cases

PLACES = (fp8_backends, fp8_backends.checkpoints, preparation, stored_weights)
"""Modules with functions for users."""
RUN = {
    "strings": run_strings,
    "recipes": run_recipes,
    "environment": run_environment,
    "files": run_files,
    "commands": run_commands,
    "functions": run_functions,
}


def result_of(case: Case) -> Result:
    """Run one case, within its time."""

    def alarm(number: int, frame: types.FrameType | None) -> None:
        raise Hang(f"no end after {SECONDS:g} s: {' < '.join(_places(frame))}")

    before = [signal.signal(number, alarm) for number in _ALARMS]
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 15 * SECONDS)
    try:
        RUN[case["area"]](case)
        return Result("worked", "")
    except FP8BackendError as error:
        return Result("refused", str(error))
    except Ignored as error:
        return Result("ignored", str(error))
    except Unclear as error:
        return Result("unclear", str(error))
    except (Exception, Hang) as error:
        places = " < ".join(_places_of(error.__traceback__))
        return Result("internal", f"{type(error).__name__}: {str(error)[:300]} ({places})")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip(_ALARMS, before, strict=True):
            signal.signal(number, handler)


def _places_of(trace: types.TracebackType | None) -> list[str]:
    """The last lines of a traceback, the innermost first."""
    frames = traceback.extract_tb(trace)[-5:]
    return [f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames)]


def _places(frame: types.FrameType | None) -> list[str]:
    return [
        f"{Path(each.filename).name}:{each.lineno}"
        for each in reversed(traceback.extract_stack(frame)[-5:])
    ]


def smaller(case: Case) -> Iterator[Case]:
    """The same case with less in it."""
    for key in ("fields", "variables", "files") if "function" not in case else ():
        for name in case.get(key, ()):
            yield {
                **case,
                key: {other: value for other, value in case[key].items() if other != name},
            }
    for key in ("argv", "arguments"):
        for at in range(len(case.get(key, ()))):
            yield {**case, key: case[key][:at] + case[key][at + 1 :]}
    lines = case.get("content", "").splitlines(keepends=True)
    for at in range(len(lines) if len(lines) < 40 else 0):
        yield {**case, "content": "".join(lines[:at] + lines[at + 1 :])}
    if text := case.get("text", ""):
        yield from (
            {**case, "text": text[: len(text) // 2]},
            {**case, "text": text[:-1]},
            {**case, "text": text[1:]},
        )


def shrunk(case: Case, outcome: str, tries: int = 60) -> Case:
    """Return the smallest case found with the same outcome."""
    for _ in range(tries):
        case_, case = (
            case,
            next((each for each in smaller(case) if _same_fault(each, outcome)), case),
        )
        if case_ is case:
            break
    return case


def _same_fault(case: Case, outcome: str) -> bool:
    try:
        return result_of(case).outcome == outcome
    except KeyError:
        return False


def run_all(cases: list[Case], shown: int) -> tuple[dict[str, collections.Counter], list[dict]]:
    """Count outcomes by area, and shrink the first faults of each kind."""
    counts: dict[str, collections.Counter] = {}
    faults: list[dict] = []
    seen: set[str] = set()
    for case in cases:
        outcome, message = result_of(case)
        counts.setdefault(case["area"], collections.Counter())[outcome] += 1
        kind = message.rpartition("(")[2] if outcome == "internal" else message[:60]
        if outcome in OUTCOMES[2:] and (outcome, kind) not in seen and len(faults) < shown:
            seen.add((outcome, kind))
            small = shrunk(case, outcome)
            faults.append({"outcome": outcome, "message": result_of(small).message, "case": small})
    return counts, faults


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the package's messages on valid input."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def limit_memory() -> None:
    """End a case above 4 GiB in MemoryError, to spare the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, resource.RLIM_INFINITY))


def warm_up() -> None:
    """Load the modules of commands in advance, so no case waits for them."""
    for argv in (
        ["doctor", "--no-test"],
        ["estimate", "--params", "1"],
        ["compare", "--text", "/nowhere"],
        ["launch", "/x"],
        ["advise", "--text", "/x"],
        ["monitor"],
        ["checkpoint", "/x"],
    ):
        run_command(argv)


def report(counts: dict[str, collections.Counter], faults: list[dict]) -> str:
    rows = [
        [area, found.total(), *(found[outcome] for outcome in OUTCOMES)]
        for area, found in counts.items()
    ]
    rows.append(
        ["all", *(sum(row[column] for row in rows) for column in range(1, len(OUTCOMES) + 2))]
    )
    lines = [table(["area", "cases", *OUTCOMES], rows)]
    for fault in faults:
        case = json.dumps(fault["case"])
        lines += ["", f"{fault['outcome']}: {shortened(fault['message'], 500)}"]
        lines += [f"  --replay {shortened(shlex.quote(case), 800)}"]
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="300 cases")
    parser.add_argument("--shown", type=int, default=20, help="faults to shrink and print")
    parser.add_argument("--area", choices=RUN, help="only the cases of one area")
    parser.add_argument("--replay", metavar="JSON", help="run one case, as printed")
    parser.add_argument(
        "--out", metavar="FOLDER", help="where the record goes, as fuzz_cpu_FEATURES.json"
    )
    return parser.parse_args()


def run() -> None:
    arguments = parsed()
    if arguments.replay:
        outcome, message = result_of(json.loads(arguments.replay))
        print(f"{outcome}: {message}")
        raise SystemExit(outcome in OUTCOMES[2:])
    start = time.perf_counter()
    cases = fuzz_cases.cases(300 if arguments.quick else arguments.cases, arguments.seed)
    with quiet():
        warm_up()
        limit_memory()
        counts, faults = run_all(
            [each for each in cases if arguments.area in (None, each["area"])], arguments.shown
        )
    seconds = time.perf_counter() - start
    print(report(counts, faults))
    print(f"\n{len(cases)} cases, seed {arguments.seed}, {seconds:.1f} s")
    record = {
        "question": "bad input",
        "seed": arguments.seed,
        "seconds": seconds,
        "areas": counts,
        "faults": faults,
    }
    write_json(
        arguments.out and str(Path(arguments.out) / f"fuzz_cpu_{cpu_features()}.json"), record
    )
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    run()
