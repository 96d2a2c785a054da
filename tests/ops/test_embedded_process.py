from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from ops.embedded import ServerError, ServerHandle, is_running, process, stop

FOR_EVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {FOR_EVER}"


def spawn(code: str, log: Path) -> ServerHandle:
    pid, created_at = process.spawn([sys.executable, "-c", code], log=log, die_with_parent=True)
    return ServerHandle(name="example", address="nowhere", port=1, pid=pid, created_at=created_at, log=log)


async def until_up(handle: ServerHandle) -> None:
    async def is_up() -> bool:
        return "up" in handle.log.read_text()

    await process.wait_ready(handle.name, handle.pid, handle.created_at, is_up, log=handle.log, timeout_s=20)


async def never() -> bool:
    return False


async def test_server_stops_when_asked_and_stopping_again_does_nothing(tmp_path: Path) -> None:
    handle = spawn(FOR_EVER, tmp_path / "logs" / "log")
    await until_up(handle)
    assert is_running(handle)
    assert os.getpgid(handle.pid) == handle.pid != os.getpgid(0)
    await stop(handle)
    await stop(handle)
    assert not is_running(handle)
    assert not psutil.pid_exists(handle.pid)


async def test_server_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    handle = spawn(STUBBORN, tmp_path / "log")
    await until_up(handle)
    await stop(handle, grace_s=0.1)
    assert not is_running(handle)


async def test_pid_that_belongs_to_another_process_by_now_is_left_alone(tmp_path: Path) -> None:
    handle = spawn(FOR_EVER, tmp_path / "log")
    await until_up(handle)
    older = ServerHandle.from_dict(handle.to_dict() | {"created_at": handle.created_at - 60})
    assert not is_running(older)
    await stop(older)
    assert is_running(handle)
    await stop(handle)


async def test_server_that_ends_at_start_is_reported_with_its_last_words_and_its_log(tmp_path: Path) -> None:
    handle = spawn("raise SystemExit('no such disk')", tmp_path / "log")
    with pytest.raises(ServerError, match=r"example ended at start \(no such disk\); its log: .*log") as caught:
        await process.wait_ready("example", handle.pid, handle.created_at, never, log=handle.log, timeout_s=20)
    assert caught.value.log == handle.log


async def test_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    handle = spawn(FOR_EVER, tmp_path / "log")
    await until_up(handle)
    with pytest.raises(ServerError, match="was not ready within 0 s"):
        await process.wait_ready("example", handle.pid, handle.created_at, never, log=handle.log, timeout_s=0)
    await stop(handle)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent")
async def test_server_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = spawn(
        "import sys, signal; from pathlib import Path; from ops.embedded import process;"
        f"command, log = [sys.executable, '-c', {FOR_EVER!r}], Path({str(log)!r} + '2');"
        "pid, _ = process.spawn(command, log=log, die_with_parent=True);"
        "print(pid, 'up', flush=True); signal.pause()",
        log,
    )
    await until_up(parent)
    await until_up(dataclasses.replace(parent, log=Path(f"{log}2")))  # only then is the child tied to its parent
    child = psutil.Process(int(log.read_text().split()[0]))
    os.kill(parent.pid, signal.SIGKILL)
    await stop(parent)
    _, alive = psutil.wait_procs([child], timeout=10)
    assert alive == []


def test_handle_survives_a_state_file(tmp_path: Path) -> None:
    handle = ServerHandle(name="n", address="a", port=1, pid=2, created_at=3.5, log=tmp_path)
    assert ServerHandle.from_dict(handle.to_dict()) == handle


def test_free_ports_differ() -> None:
    assert len(set(process.free_ports(20))) == 20
