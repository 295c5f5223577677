"""Compile, cache and load code: count compilations, and fail in each way."""

import os
import signal
import threading
import time
import warnings

import pytest
from adam_cases import needs_compiler

from fp8_backends.kernels import adam_cpu

pytestmark = needs_compiler

FLAGS = ("-shared", "-fPIC")
OURS = 42


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "a source" / "answer.cpp"
    file.parent.mkdir()
    file.write_text(f'extern "C" int answer() {{ return {OURS}; }}\n')
    return file


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "a cache"))
    return tmp_path / "a cache" / "fp8_backends"


def load(source, flags=FLAGS):
    """Return the library, or None, of a new process's first use."""
    adam_cpu.library.cache_clear()
    return adam_cpu.library(source, flags)


def answer(source, flags=FLAGS):
    """Return the result of a new process's first use; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(source, flags).answer()


def libraries(cache):
    return sorted(cache.glob("answer-*.so"))


def compiler(tmp_path, monkeypatch, line='exec g++ "$@"'):
    """Let CXX name a script; return the log of its runs."""
    log, script = tmp_path / "log", tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\necho compiled >> {log}\n{line}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def in_child(run):
    """Run in a forked process; return its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)  # ends a deadlock
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_compiled_library_is_cached(source, cache, tmp_path, monkeypatch, capfd):
    log = compiler(tmp_path, monkeypatch)
    assert [answer(source), answer(source)] == [OURS, OURS]
    assert log.read_text() == "compiled\n" and list(cache.iterdir()) == libraries(cache)
    assert capfd.readouterr().err.count("compiling the optimizer step") == 1


@pytest.mark.parametrize("change", ["source", "compiler", "flags", "machine"])
def test_changed_input_is_recompiled(source, cache, monkeypatch, change):
    assert answer(source) == OURS
    flags, expected = FLAGS, OURS
    if change == "source":
        expected = 43
        source.write_text(f'extern "C" int answer() {{ return {expected}; }}\n')
    elif change == "compiler":
        monkeypatch.setenv("CXX", "g++ -O1")
    elif change == "flags":
        flags = (*FLAGS, "-O1")
    else:
        monkeypatch.setattr("platform.machine", lambda: "another")
    assert answer(source, flags) == expected and len(libraries(cache)) == 2


@pytest.mark.parametrize("named", [{"XDG_CACHE_HOME": "xdg"}, {"HOME": "home"}])
def test_default_folder_is_that_of_pytorch(source, cache, tmp_path, monkeypatch, named):
    from torch.utils.cpp_extension import get_default_build_root

    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in named.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    assert answer(source) == OURS
    (library,) = tmp_path.rglob("answer-*.so")
    assert str(library.parent.parent) == get_default_build_root()


def test_unusable_folder_compiles_for_this_process_alone(source, cache, tmp_path, monkeypatch):
    """Stand for a read-only or full disk by a file in place of the folder."""
    cache.parent.touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="for this process alone.*TORCH_EXTENSIONS_DIR") as seen:
        assert load(source).answer() == OURS
    assert len(seen) == 1 and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("length", [0, 64])
def test_damaged_library_is_named(source, cache, tmp_path, monkeypatch, length):
    assert answer(source) == OURS
    (library,) = libraries(cache)
    # glibc takes a known path for the library that it loaded from there
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "other"))
    damaged = tmp_path / "other" / "fp8_backends" / library.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(library.read_bytes()[:length])
    with pytest.warns(UserWarning, match=f"alone.*{damaged}.*Delete a damaged library"):
        assert load(source).answer() == OURS


def test_folder_without_permission_to_load_code(source, cache, monkeypatch):
    """Imitate a disk mounted with noexec: the first call of dlopen fails."""
    calls, real = [], adam_cpu.ctypes.CDLL

    def loaded(path):
        calls.append(path)
        if len(calls) == 1:
            raise OSError("failed to map segment from shared object: Operation not permitted")
        return real(path)

    monkeypatch.setattr(adam_cpu.ctypes, "CDLL", loaded)
    with pytest.warns(UserWarning, match="failed to map segment.*from which code may be loaded"):
        assert load(source).answer() == OURS
    assert not os.path.exists(calls[1])


def test_process_forked_while_a_thread_compiles(source, cache, tmp_path, monkeypatch):
    """The compiler writes half of its file, which nobody may load."""
    half = 'for last; do :; done\necho half > "$last"'
    log = compiler(tmp_path, monkeypatch, f'{half}\ntouch {tmp_path}/half\nsleep 1\nexec g++ "$@"')

    def use():
        assert answer(source) == OURS

    thread = threading.Thread(target=load, args=(source,))
    thread.start()
    while not (tmp_path / "half").exists():
        time.sleep(0.01)
    assert in_child(use) == 0
    thread.join()
    assert log.read_text() == "compiled\n" * 2 and list(cache.iterdir()) == libraries(cache)


def test_process_killed_while_it_compiles(source, cache, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, "kill -9 $PPID")
    assert in_child(lambda: load(source)) == -signal.SIGKILL
    assert len(list(cache.iterdir())) == 1  # the folder of its compiler
    monkeypatch.setenv("CXX", "g++")
    assert answer(source) == OURS and len(libraries(cache)) == 1


@pytest.mark.parametrize(
    "command, said",
    [
        ("no-such-compiler", "No such file.*no-such-compiler"),
        ("'g++", "No closing quotation"),
        ("g++ --no-such-flag", "returned 1.*unrecognized"),
        ("sh -c 'kill -9 $$'", "returned -9"),
    ],
)
def test_failed_compilation_warns_once(source, cache, monkeypatch, command, said):
    monkeypatch.setenv("CXX", command)
    match = f"(?s)runs uncompiled.* CXX .*TORCH_EXTENSIONS_DIR.*{said}"
    with pytest.warns(UserWarning, match=match) as seen:
        assert load(source) is None and adam_cpu.library(source, FLAGS) is None
    assert len(seen) == 1


def test_hanging_compiler_is_abandoned(source, cache, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, "exec sleep 30")
    monkeypatch.setattr(adam_cpu, "LONGEST_COMPILE", 0.2)
    start = time.monotonic()
    with pytest.warns(UserWarning, match="timed out after 0.[12]"):
        assert load(source) is None
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("command", ["g++ -O1", "env X=1 g++", "'{folder}/with space/g++' -O1"])
def test_a_compiler_may_have_arguments(source, cache, tmp_path, monkeypatch, command):
    (tmp_path / "with space").mkdir()
    script = tmp_path / "with space" / "g++"
    script.write_text('#!/bin/sh\nexec g++ "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", command.format(folder=tmp_path))
    assert answer(source) == OURS


def test_compiler_without_openmp_is_used(source, cache, tmp_path, monkeypatch):
    line = 'case "$*" in *-fopenmp*) exit 1;; esac\nexec g++ "$@"'
    log = compiler(tmp_path, monkeypatch, line)
    assert answer(source) == OURS and log.read_text() == "compiled\n" * 2
