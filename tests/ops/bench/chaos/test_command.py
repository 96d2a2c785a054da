"""`gea bench chaos` on a run that is done already: its checkpoint answers, and nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ops.bench.chaos.checkpoint import save_rounds
from ops.bench.chaos.faults import FaultGroup
from ops.bench.chaos.result import RoundResult
from ops.bench.chaos.run import ChaosOptions
from ops.bench.chaos.stack import Size
from ops.cli import app

SWITCHABLE = frozenset(FaultGroup) - {FaultGroup.KILLS}


def done(path: Path, result: RoundResult, *, groups: frozenset[FaultGroup] = SWITCHABLE) -> None:
    options = ChaosOptions(num_kills=5, seed=3, size=Size(), groups=groups)
    save_rounds(path, options.conditions, [result])


def bench(path: Path, *more: str) -> Result:
    arguments = ["bench", "chaos", "--kills", "5", "--seed", "3", "--checkpoint", str(path), "--no-production-gap"]
    return CliRunner().invoke(app, [*arguments, "--json", *more])


def last_object(result: Result) -> dict[str, Any]:
    found = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_a_run_that_kept_every_promise_succeeds(tmp_path: Path) -> None:
    done(tmp_path / "c", RoundResult(kills=5, requests=9, recovery_ms=[10, 20], faults={"kill": 5}))
    answer = bench(tmp_path / "c")
    assert answer.exit_code == 0, answer.output
    found = last_object(answer)
    assert (found["kills"], found["requests"], found["lost"]) == (5, 9, 0)
    assert found["conditions"]["seed"] == 3


@pytest.mark.parametrize("harm", ["lost", "duplicated", "altered", "leaked_blocks", "leaked_tasks", "uncommitted"])
def test_any_harm_fails_the_command_and_is_reported(tmp_path: Path, harm: str) -> None:
    numbers: dict[str, Any] = {harm: 2}
    done(tmp_path / "c", RoundResult(kills=5, problems=["what it was"], **numbers))
    answer = bench(tmp_path / "c")
    found = last_object(answer)
    assert answer.exit_code == 1
    assert (found[harm], found["problems"]) == (2, ["what it was"])
    assert harm in found["error"]["message"]


def test_a_switched_off_group_is_another_run(tmp_path: Path) -> None:
    done(tmp_path / "c", RoundResult(kills=5))
    answer = bench(tmp_path / "c", "--no-redis")
    assert answer.exit_code == 1
    assert "fault_groups" in last_object(answer)["error"]["message"]
    done(tmp_path / "c", RoundResult(kills=5), groups=SWITCHABLE - {FaultGroup.REDIS})
    assert bench(tmp_path / "c", "--no-redis").exit_code == 0


@pytest.mark.parametrize(
    "wrong",
    [("--engine", "remote"), ("--kills", "0"), ("--workers", "1"), ("--seed", "-1")],
)
def test_a_value_out_of_range_is_refused_by_name(tmp_path: Path, wrong: tuple[str, str]) -> None:
    answer = bench(tmp_path / "c", *wrong)
    assert answer.exit_code != 0
    assert wrong[0] in answer.output
