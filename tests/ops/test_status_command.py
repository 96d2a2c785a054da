"""What `gea status` tells about workers."""

from __future__ import annotations

import pytest

from ops.commands import stack
from schemas.worker import Pool, WorkerState, WorkerStatus


def status(**changes: object) -> WorkerStatus:
    values: dict[str, object] = {
        "worker_id": "generation-1", "pool": Pool.GENERATION, "colour": "blue", "state": WorkerState.READY,
        "updated_ms": 1, "partitions": (0, 1, 2, 7),
    }  # fmt: skip
    return WorkerStatus(**(values | changes))  # type: ignore[arg-type]


def test_partitions_and_why_a_worker_is_not_ready_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    slow = status(worker_id="generation-2", state=WorkerState.SUSPENDED, reason="step_ms 90, usual 20", partitions=())
    stack._show(None, "kafka:9092", [status(), slow])
    told = capsys.readouterr().out
    assert "0-2 7" in told
    assert "suspended" in told
    assert "generation-2 is suspended: step_ms 90, usual 20" in told
    assert stack._row(status())["partitions"] == [0, 1, 2, 7]


def test_what_a_stranger_calls_a_worker_is_no_markup_and_does_nothing_to_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stack._show(None, "kafka:9092", [status(worker_id="[/x]\x1b[2J", state=WorkerState.FAILED, reason="\x1b[/y]")])
    told = capsys.readouterr().out
    assert r"[/x]\x1b[2J" in told
    assert "\x1b" not in told


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([0, 1], "0-1"), ([0, 2, 3, 4], "0 2-4")])
def test_partitions_are_shown_as_ranges(numbers: list[int], text: str) -> None:
    assert stack.ranges_of(numbers) == text
