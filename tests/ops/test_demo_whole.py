"""The whole path, as a newcomer sees it: real Kafka, Redis and models, one question, one answer with its source."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.stack import StackFolder
from tests.real_parts import require_whole_stack, stack_environment

pytestmark = [pytest.mark.kafka, pytest.mark.redis, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home for stacks; everything in it is stopped afterwards."""
    require_whole_stack()
    yield tmp_path / "home"
    gea(tmp_path / "home", "down", "--all", "--purge")


def gea(home: Path, *arguments: str, module: str = "ops.cli") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=stack_environment(home, ROOT),
        capture_output=True,
        text=True,
        timeout=300,
    )


def told(answer: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the one JSON object of a command that succeeded."""
    assert answer.returncode == 0, answer.stderr
    (line,) = answer.stdout.splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def test_demo_answers_with_the_right_number_and_its_source_and_leaves_nothing(home: Path) -> None:
    found = told(gea(home, "demo", "--json"))
    assert "30" in found["answer"]
    assert "returns-shoes" in {each["passage_id"] for each in found["citations"]}
    assert "returns-shoes" in {each["passage_id"] for each in found["passages"]}
    assert found["strategy"] == "knowledge"
    assert found["broker"].startswith("Apache Kafka ")
    assert 0 < found["ttft_ms"] <= found["total_ms"]
    assert found["tokens"] > 0
    assert found["tokens_per_s"] > 0
    assert list(home.iterdir()) == []


def test_killed_worker_shows_in_status_and_an_answer_can_be_replayed(home: Path) -> None:
    found = told(gea(home, "demo", "--keep", "--json"))
    assert told(gea(home, "replay", found["request_id"], "--json"))["answer"] == found["answer"]
    state = StackFolder("default", home).load()
    assert state is not None
    (intent,) = (part for part in state.parts if part.name == "intent-1")
    psutil.Process(intent.process.pid).send_signal(signal.SIGKILL)
    psutil.Process(intent.process.pid).wait(timeout=10)
    shown = gea(home, "status")
    assert shown.returncode == 0
    assert f"intent-1 (pid {intent.process.pid}) has ended" in " ".join(shown.stdout.split())
    assert told(gea(home, "down", "--json")) == {"stopped": ["default"]}
    assert gea(home, "status").returncode == 1
