"""The chaos bench in its short form: ten kills and every kind of fault once, on a scripted engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench.chaos.faults import FaultKind
from tests.real_parts import require_servers

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.kafka, pytest.mark.redis, pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(420)]


def test_ten_kills_and_every_fault_lose_repeat_and_alter_nothing(tmp_path: Path) -> None:
    require_servers()
    checkpoint = tmp_path / "checkpoint.json"
    command = [sys.executable, "-m", "ops.cli", "bench", "chaos", "--kills", "10", "--no-production-gap", "--json"]
    command += ["--checkpoint", str(checkpoint)]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400)
    found = json.loads(answer.stdout.splitlines()[-1])
    assert answer.returncode == 0, found
    assert (found["kills"], found["lost"], found["duplicated"], found["altered"]) == (10, 0, 0, 0)
    assert (found["leaked_blocks"], found["leaked_tasks"], found["uncommitted"], found["resets"]) == (0, 0, 0, 0)
    assert set(found["faults"]) == set(FaultKind)
    assert found["take_overs"] > 0
    again = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    kept = json.loads(again.stdout.splitlines()[-1])  # nothing is left to do: the checkpoint answers
    assert (kept["kills"], kept["requests"]) == (10, found["requests"])
