"""Exit 0 or 1, and one line that says why; Redis is only warned about."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ops.healthcheck import Health, _parser, check, judge
from schemas.worker import Pool, WorkerState, WorkerStatus

ROOT = Path(__file__).resolve().parents[2]


def worker(pool: Pool = Pool.INTENT, **changes: object) -> WorkerStatus:
    values: dict[str, object] = {
        "worker_id": f"{pool}-1",
        "pool": pool,
        "colour": "blue",
        "state": WorkerState.READY,
        "updated_ms": 0,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    return WorkerStatus(**(values | changes))  # type: ignore[arg-type]


def verdict(arguments: Sequence[str], *workers: WorkerStatus) -> Health:
    options: argparse.Namespace = _parser().parse_args(arguments)
    return judge("kafka:9092", options, workers, ())


def test_answering_broker_suffices_when_no_pool_is_asked_for() -> None:
    assert verdict([]).is_healthy


def test_living_worker_of_this_host_counts_as_local() -> None:
    assert verdict(["--pool", "intent", "--local"], worker()).is_healthy


def test_a_container_whose_worker_has_stepped_aside_needs_no_restart_but_counts_as_no_ready_worker() -> None:
    aside = worker(state=WorkerState.SUSPENDED, reason="step_ms 90, usual 20")
    health = verdict(["--pool", "intent", "--local"], aside)
    assert (health.is_healthy, health.num_ready) == (True, 0)
    assert health.warnings == ("intent-1 has stepped aside: step_ms 90, usual 20",)
    assert not verdict(["--pool", "intent"], aside).is_healthy


def test_one_ready_worker_of_the_pool_suffices() -> None:
    health = verdict(["--pool", "intent"], worker(state=WorkerState.DRAINING), worker(worker_id="intent-2"))
    assert health.is_healthy
    assert health.num_ready == 1


@pytest.mark.parametrize(
    ("arguments", "found", "why"),
    [
        (["--pool", "intent"], worker(Pool.ROUTER), "no ready intent worker"),
        (["--pool", "intent"], worker(state=WorkerState.STARTING), "intent-1 is starting"),
        (["--pool", "intent"], worker(state=WorkerState.FAILED, reason="no weights"), r"is failed \(no weights\)"),
        (["--pool", "intent", "--colour", "green"], worker(), "of colour green"),
        (["--pool", "intent", "--local"], worker(host="elsewhere"), "on this host"),
        (["--pool", "intent", "--local"], worker(pid=2**22 - 1), "on this host"),
    ],
)
def test_missing_worker_is_told_with_what_there_is(arguments: list[str], found: WorkerStatus, why: str) -> None:
    health = verdict(arguments, found)
    assert not health.is_healthy
    assert re.search(why, health.why)


def test_nothing_to_connect_to_is_unhealthy_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEA_HOME", str(tmp_path))
    monkeypatch.delenv("GEA_CONFIG", raising=False)
    monkeypatch.delenv("GEA_KAFKA_BOOTSTRAP", raising=False)
    assert check(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is False
    assert "gea up" in told["why"]


def test_unreachable_broker_is_unhealthy_and_torch_is_not_imported(tmp_path: Path) -> None:
    script = (
        "import sys; from ops.healthcheck import check; code = check(sys.argv[1:]); print('torch' in sys.modules, code)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, "--kafka", "127.0.0.1:1", "--pool", "router"],
        env=os.environ | {"GEA_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, last = answer.stdout.splitlines()
    assert first.startswith("unhealthy: ")
    assert last == "False 1"


@pytest.mark.parametrize("text", ["0", "-1", "301", "nan", "soon"])
def test_time_out_of_range_is_refused_with_the_range(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        check(["--timeout", text])
    assert caught.value.code == 2
    assert "above 0 to 300" in capsys.readouterr().err
