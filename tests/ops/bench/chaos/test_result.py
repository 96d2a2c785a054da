"""Rounds add up, a checkpoint brings them back, and one of another run is refused by name."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ops.bench.chaos.checkpoint import load_rounds, save_rounds
from ops.bench.chaos.result import RoundResult, merged, report
from ops.bench.chaos.silence import SPARE_TASKS, Leaks, left_over
from ops.bench.chaos.tail import received
from ops.errors import CommandError
from streams.broker import Record

CONDITIONS = {"seed": 1, "engine": "fake"}
FIRST = RoundResult(kills=3, requests=10, recovery_ms=[100, 300], faults={"kill": 3}, longest_gap_ms=7, seconds=1.5)
SECOND = RoundResult(kills=2, requests=5, lost=1, recovery_ms=[200], faults={"kill": 1, "cut": 1}, problems=["lost"])


def test_rounds_add_up() -> None:
    total = merged([FIRST, SECOND])
    assert (total.kills, total.requests, total.lost) == (5, 15, 1)
    assert total.faults == {"kill": 4, "cut": 1}
    assert (total.longest_gap_ms, total.seconds, total.problems) == (7, 1.5, ["lost"])
    assert not total.is_clean


def test_the_report_has_the_keys_that_were_promised() -> None:
    found = report(merged([FIRST, SECOND]), CONDITIONS)
    promised = ["kills", "requests", "lost", "duplicated", "altered", "leaked_blocks", "recovery_ms"]
    assert list(found)[: len(promised)] == promised
    assert found["recovery_ms"] == {"p50": 200, "p99": 300}
    assert found["conditions"] == CONDITIONS
    json.dumps(found)


@pytest.mark.parametrize("key", ["lost", "duplicated", "altered", "leaked_blocks", "leaked_tasks", "uncommitted"])
def test_any_harm_makes_a_round_unclean(key: str) -> None:
    assert FIRST.is_clean
    harm: dict[str, Any] = {key: 1}
    assert not merged([FIRST, RoundResult(**harm)]).is_clean


def test_a_checkpoint_brings_its_rounds_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "checkpoint.json"
    assert load_rounds(path, CONDITIONS) == []
    save_rounds(path, CONDITIONS, [FIRST, SECOND])
    assert load_rounds(path, CONDITIONS) == [FIRST, SECOND]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_checkpoint_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    save_rounds(tmp_path / "c", CONDITIONS, [FIRST])
    with pytest.raises(CommandError, match="another seed"):
        load_rounds(tmp_path / "c", CONDITIONS | {"seed": 2})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "rounds": [{"colour": 1}], "conditions": {}}'])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c").write_text(text)
    with pytest.raises(CommandError, match="checkpoint"):
        load_rounds(tmp_path / "c", {})


def test_tasks_that_an_idle_worker_does_not_have_are_left_over() -> None:
    idle = {"Heartbeat._run": 1, "AIOKafkaConnection._read": 4}
    assert left_over(idle, idle) == Counter()
    assert left_over({**idle, "AIOKafkaConnection._read": 4 + SPARE_TASKS}, idle) == Counter()
    assert left_over({**idle, "GenerationHandler._take": 1}, idle) == {"GenerationHandler._take": 1}
    assert left_over({**idle, "Heartbeat._run": 9}, idle) == {"Heartbeat._run": 8}


@pytest.mark.parametrize("leaks", [Leaks(tokens=1), Leaks(queued=1), Leaks(tasks=Counter(a=1)), Leaks(uncommitted=1)])
def test_anything_left_is_a_leak(leaks: Leaks) -> None:
    assert Leaks().is_clean
    assert not leaks.is_clean


def record(offset: int, request_id: str, hop: int = 0) -> Record:
    headers = (("request_id", request_id.encode()), ("hop", str(hop).encode()))
    return Record(topic="t", partition=0, offset=offset, timestamp_ms=0, key=b"k", value=b"", headers=headers)


def test_a_record_counts_as_handed_on_if_a_higher_hop_or_a_retry_follows() -> None:
    records = [record(0, "a"), record(1, "b"), record(2, "a", hop=1), record(3, "c")]
    handed_on = [each.is_handed_on for each in received(records, retried={"c"})]
    assert handed_on == [True, False, False, True]
