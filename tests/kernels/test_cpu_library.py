"""Compile, cache and load code: check its author and completeness, and count compilations."""

import ctypes
import fcntl
import grp
import hashlib
import os
import pwd
import stat
import subprocess
import threading
import time
import warnings

import pytest
from adam_cases import needs_compiler

from fp8_backends.kernels import adam_cpu as cpu_library
from fp8_backends.kernels.adam_cpu import Library

pytestmark = needs_compiler

FLAGS = ("-shared", "-fPIC")
OURS, FOREIGN = 42, 13


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "answer.cpp"
    file.write_text(f'extern "C" int answer() {{ return {OURS}; }}\n')
    return file


def made(folder, number):
    """Build a library that returns this number."""
    (folder / "source.cpp").write_text(f'extern "C" int answer() {{ return {number}; }}\n')
    library = folder / f"{number}.so"
    subprocess.run(["g++", *FLAGS, str(folder / "source.cpp"), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """Provide a compiler that copies an earlier result: most tests count compilations."""
    folder = tmp_path_factory.mktemp("compiler")
    script = folder / "g++"
    find = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && target=$2; shift; done'
    script.write_text(f"#!/bin/sh\n{find}\ncp {made(folder, OURS)} $target\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def cache(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fp8_backends"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Return the content of an attacker's library."""
    return made(tmp_path_factory.mktemp("foreign"), FOREIGN).read_bytes()


def libraries(cache):
    return sorted(cache.glob("answer-*.so"))


def answer(source):
    """Return the result of a new process's first use; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Library(source, FLAGS).loaded().answer()


def plant(cache, content, digest=None):
    """Replace the library, under the name of its content or of another."""
    (library,) = libraries(cache)
    library.unlink()
    planted = (
        cache
        / f"{library.stem.rpartition('-')[0]}-{digest or hashlib.sha256(content).hexdigest()}.so"
    )
    planted.write_bytes(content)
    planted.chmod(0o600)
    return planted


def test_compiled_library_is_cached_privately(source, cache, monkeypatch):
    monkeypatch.setenv("CXX", "g++")
    umask = os.umask(0)
    try:
        assert answer(source) == OURS
    finally:
        os.umask(umask)
    (first,) = libraries(cache)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (cache.parent, cache, first)]
    inode = first.stat().st_ino
    assert answer(source) == OURS and modes == [0o700, 0o700, 0o600]
    assert [each.stat().st_ino for each in libraries(cache)] == [inode]
    assert sorted(each.suffix for each in cache.iterdir()) == [".lock", ".so"]


@pytest.mark.parametrize("length", [0, 1, 64, 5000, -1])
def test_half_written_library_is_recompiled(source, cache, length):
    assert answer(source) == OURS
    (library,) = libraries(cache)
    whole = library.read_bytes()
    library.unlink()  # the library loaded in this process stays unchanged
    library.write_bytes(whole[:length])
    library.chmod(0o600)
    assert answer(source) == OURS and libraries(cache)[0].read_bytes() == whole


@pytest.mark.parametrize("named_by_its_content", [False, True])
def test_planted_library_needs_the_name_of_its_content(
    source, cache, foreign, named_by_its_content
):
    """Trust this user's files: nothing else is wrong with the planted one."""
    assert answer(source) == OURS
    digest = libraries(cache)[0].stem.rpartition("-")[2]
    plant(cache, foreign, None if named_by_its_content else digest)
    assert answer(source) == (FOREIGN if named_by_its_content else OURS)


def make_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


def give_away(path):
    if os.geteuid():
        pytest.skip("root alone can make files of another user")
    os.chown(path, 12345, 12345)


WAYS = {
    "the group may write it": lambda path: path.chmod(0o660),
    "all may write it": lambda path: path.chmod(0o606),
    "link": make_link,
    "a second name": lambda path: os.link(path, path.with_name("second")),
    "pipe": make_pipe,
    "of another user": give_away,
}


@pytest.mark.parametrize("make_suspicious", WAYS.values(), ids=list(WAYS))
def test_file_writable_by_others_is_not_loaded(source, cache, foreign, make_suspicious):
    assert answer(source) == OURS
    make_suspicious(plant(cache, foreign))
    assert answer(source) == OURS


def test_own_folder_writable_by_others_is_closed(source, cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert answer(source) == OURS and stat.S_IMODE(cache.stat().st_mode) == 0o700


def replace_folder(cache):
    cache.rmdir()
    cache.touch()


SPOILED = {
    "of another user": (give_away, "belongs to another user"),
    "above it of another user": (lambda cache: give_away(cache.parent), "belongs to another user"),
    "above it open": (lambda cache: cache.parent.chmod(0o707), "others may write"),
    "a link": (make_link, "is a file or a link"),
    "a file": (replace_folder, "is a file or a link"),
}


@pytest.mark.parametrize("spoil, reason", SPOILED.values(), ids=list(SPOILED))
def test_foreign_folder_is_not_used(source, cache, spoil, reason):
    cache.mkdir(parents=True)
    spoil(cache)
    with pytest.warns(
        UserWarning, match=f"for this process alone.*{reason}.*XDG_CACHE_HOME"
    ) as seen:
        assert Library(source, FLAGS).loaded().answer() == OURS
    assert len(seen) == 1 and libraries(cache) == []


@pytest.fixture
def users(monkeypatch):
    """Fake the system's lists of users and groups."""

    def answers(group_name="me", members=(), others=()):
        uid, gid = os.geteuid(), os.getegid()
        me = pwd.struct_passwd(("me", "x", uid, gid, "", "/", ""))
        listed = [pwd.struct_passwd((name, "x", uid + 1, gid, "", "/", "")) for name in others]
        monkeypatch.setattr(pwd, "getpwuid", {uid: me}.__getitem__)
        monkeypatch.setattr(pwd, "getpwall", lambda: [me, *listed])
        groups = (
            {gid: grp.struct_group((group_name, "x", gid, list(members)))} if group_name else {}
        )
        monkeypatch.setattr(grp, "getgrgid", groups.__getitem__)

    return answers


@pytest.mark.parametrize("members", [(), ("me",)])
def test_folder_writable_by_private_group_is_used(source, cache, users, members):
    """Use the umask 002 of Fedora and some Debian systems, which makes all folders
    group-writable."""
    users(members=members)
    before = os.umask(0o002)
    try:
        cache.parent.mkdir(0o775)
        assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o775
        assert answer(source) == OURS and answer(source) == OURS
    finally:
        os.umask(before)
    assert len(libraries(cache)) == 1


SHARED = {
    "not of one's name": {"group_name": "domain users"},
    "with a member": {"members": ("me", "someone")},
    "another user's first group": {"others": ("someone",)},
    "unknown": {"group_name": None},
}


@pytest.mark.parametrize("group", SHARED.values(), ids=list(SHARED))
def test_folder_writable_by_shared_group_is_not_used(cache, users, group):
    users(**group)
    cache.mkdir(parents=True)
    cache.parent.chmod(0o770)
    with pytest.raises(PermissionError, match="others may write"):
        cpu_library.make_own(cache)


def test_folder_with_access_control_list_is_not_used(cache, users, monkeypatch):
    """Fake the answer: not every file system of a test has such lists."""
    users()
    cache.mkdir(parents=True)
    cache.parent.chmod(0o770)
    cpu_library.make_own(cache)
    monkeypatch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"])
    with pytest.raises(PermissionError, match="others may write"):
        cpu_library.make_own(cache)


def test_sticky_world_writable_folder_is_used(source, cache, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tmp" / "mine"))
    assert (
        answer(source) == OURS and len(libraries(tmp_path / "tmp" / "mine" / "fp8_backends")) == 1
    )


def test_a_relative_cache_folder_is_ignored(source, cache, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert answer(source) == OURS and not (tmp_path / "cache").exists()
    assert len(libraries(tmp_path / "home" / ".cache" / "fp8_backends")) == 1


def test_without_home_each_process_compiles_and_leaves_nothing(
    source, cache, tmp_path, monkeypatch
):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.warns(UserWarning, match="no home folder"):
        assert Library(source, FLAGS).loaded().answer() == OURS
    assert sorted(tmp_path.iterdir()) == before


def counting_compiler(tmp_path, monkeypatch, line='exec g++ "$@"'):
    log, script = tmp_path / "log", tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\necho compiled >> {log}\n{line}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def test_concurrent_threads_compile_once(source, cache, tmp_path, monkeypatch, capfd):
    log = counting_compiler(tmp_path, monkeypatch)
    library, barrier, answers = Library(source, FLAGS), threading.Barrier(8), []

    def use():
        barrier.wait()
        answers.append(library.loaded().answer())

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [OURS] * 8 and log.read_text() == "compiled\n"
    assert capfd.readouterr().err.count("compiling the optimizer step") == 1


def test_failed_compilation_is_retried_after_a_pause(source, cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    library = Library(source, FLAGS)
    with pytest.warns(UserWarning, match="runs uncompiled.*XDG_CACHE_HOME.*no-such-compiler"):
        assert library.loaded() is None
    assert library.next_try >= time.monotonic() + 500
    monkeypatch.setenv("CXX", "g++")
    assert library.loaded() is None  # at each step it would be tried again
    monkeypatch.setattr(library, "next_try", time.monotonic())
    assert library.loaded().answer() == OURS


def test_hanging_compiler_is_abandoned(source, cache, tmp_path, monkeypatch):
    """Include a compiler with a surviving child process."""
    counting_compiler(tmp_path, monkeypatch, "sleep 30")
    monkeypatch.setattr(cpu_library, "LONGEST_COMPILE", 0.2)
    start = time.monotonic()
    with pytest.warns(UserWarning, match="timed out after 0.[12]"):
        assert Library(source, FLAGS).loaded() is None
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "command",
    ["g++ -O1", "env X=1 g++", "'{folder}/with space/g++' -O1", "{folder}/with space/g++"],
)
def test_a_compiler_may_have_arguments(source, cache, tmp_path, monkeypatch, command):
    (tmp_path / "with space").mkdir()
    script = tmp_path / "with space" / "g++"
    script.write_text('#!/bin/sh\nexec g++ "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", command.format(folder=tmp_path))
    assert answer(source) == OURS


@pytest.mark.parametrize(
    "command, said", [("'g++", "No closing quotation"), ("g++ --no-such-flag", "unrecognized")]
)
def test_compiler_error_is_reported(source, cache, monkeypatch, command, said):
    monkeypatch.setenv("CXX", command)
    with pytest.warns(UserWarning, match=said):
        assert Library(source, FLAGS).loaded() is None


def test_stale_lock_is_ignored(source, cache, monkeypatch):
    assert answer(source) == OURS
    (library,), (lock,) = libraries(cache), cache.glob("*.lock")
    library.unlink()
    monkeypatch.setattr(cpu_library, "LONGEST_WAIT", 0.2)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert answer(source) == OURS


def test_remains_of_killed_process_are_removed(source, cache):
    left, fresh = cache / "build-killed", cache / "build-running"
    for folder in (left, fresh):
        folder.mkdir(parents=True)
        (folder / "library").touch()
    os.utime(left, (0, 0))
    assert answer(source) == OURS and not left.exists() and fresh.exists()


def test_unloadable_cached_library_is_compiled_elsewhere(source, cache, monkeypatch):
    """Imitate a disk mounted with noexec: the first call of dlopen fails."""
    calls, load = [], ctypes.CDLL

    def loaded(path):
        calls.append(path)
        if len(calls) == 1:
            raise OSError("failed to map segment from shared object: Operation not permitted")
        return load(path)

    monkeypatch.setattr(cpu_library.ctypes, "CDLL", loaded)
    with pytest.warns(UserWarning, match="failed to map segment.*from which code may be loaded"):
        assert Library(source, FLAGS).loaded().answer() == OURS
    assert not os.path.exists(calls[1])
