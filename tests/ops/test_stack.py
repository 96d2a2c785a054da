"""The state of a stack survives its writer, and only the stack's own processes are ever taken for it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from ops.errors import CommandError
from ops.stack import (
    ID_VARIABLE,
    Part,
    Process,
    Role,
    StackFolder,
    StackState,
    find_strays,
    list_stacks,
    running_stack,
    stacks_folder,
)

SLEEPER_ID = uuid.uuid4().hex  # another run of these tests may be on this machine


def state_of(folder: StackFolder, *parts: Part, is_ready: bool = True) -> StackState:
    return StackState(id="an-id", name=folder.name, folder=str(folder.path), is_ready=is_ready, parts=parts)


def part_of(process: Process) -> Part:
    return Part(role=Role.WORKER, name="intent-1", process=process, log="intent-1.log")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until it is told to end."""
    environ = os.environ | {ID_VARIABLE: SLEEPER_ID}
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has started: its environment is its own
        yield process
        process.kill()


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "-x", "x" * 42, "a b"])
def test_name_that_could_leave_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="stack name"):
        StackFolder(name, tmp_path)


def test_folder_of_all_stacks_follows_the_environment() -> None:
    assert stacks_folder({"GEA_HOME": "/a/b"}) == Path("/a/b")
    assert stacks_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/gea")
    assert stacks_folder({}) == Path.home() / ".local" / "state" / "gea"


def test_state_is_read_back_as_written(tmp_path: Path) -> None:
    folder = StackFolder("one", tmp_path)
    state = state_of(folder, part_of(Process.current()))
    folder.save(state)
    assert folder.load() == state
    assert [each.name for each in list_stacks(tmp_path)] == ["one"]
    folder.forget()
    folder.forget()
    assert folder.load() is None
    assert list_stacks(tmp_path) == []


def test_state_may_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    folder = StackFolder("one", tmp_path)
    folder.save(state_of(folder))
    assert folder.state_file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id": 1}', b"\xff"])
def test_broken_state_is_named_with_its_remedy(content: bytes, tmp_path: Path) -> None:
    folder = StackFolder("one", tmp_path)
    folder.path.mkdir()
    folder.state_file.write_bytes(content)
    with pytest.raises(CommandError, match=r"stack\.json .*remove it"):
        folder.load()


def test_state_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = StackFolder("one", tmp_path)
    folder.save(msgspec.structs.replace(state_of(folder), version=99))
    with pytest.raises(CommandError, match="another version"):
        folder.load()


def test_lock_is_refused_while_another_holds_it(tmp_path: Path) -> None:
    folder = StackFolder("one", tmp_path)
    with folder.locked(), pytest.raises(CommandError, match="another command"), StackFolder("one", tmp_path).locked():
        pytest.fail("two hold the lock")
    with folder.locked(), StackFolder("two", tmp_path).locked():
        pass


def test_process_with_another_creation_time_is_not_ours() -> None:
    current = Process.current()
    assert current.is_running()
    assert not msgspec.structs.replace(current, created_at=current.created_at - 100).is_running()


def test_stack_runs_only_when_ready_and_alive(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    folder = StackFolder("one", tmp_path)
    alive = part_of(Process(pid=sleeper.pid, created_at=psutil.Process(sleeper.pid).create_time()))
    assert running_stack("one", tmp_path) is None
    folder.save(state_of(folder, alive, is_ready=False))
    assert running_stack("one", tmp_path) is None
    folder.save(state_of(folder, alive))
    assert running_stack("one", tmp_path) is not None
    sleeper.kill()
    sleeper.wait()
    assert running_stack("one", tmp_path) is None


def test_stray_is_found_by_the_id_in_its_environment(sleeper: subprocess.Popen[bytes]) -> None:
    assert [each.pid for each in find_strays(SLEEPER_ID)] == [sleeper.pid]
    assert find_strays("another-id") == []
    assert find_strays("") == []
