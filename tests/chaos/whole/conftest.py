"""One whole stack for the tests of this folder: real Kafka, Redis, models, one worker of each pool."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.stack import Part, StackFolder, StackState
from tests.real_parts import require_whole_stack, stack_environment

ROOT = Path(__file__).resolve().parents[3]


@dataclass(slots=True)
class WholeStack:
    """A running stack and the processes that a test started beside it."""

    home: Path
    environ: dict[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def state(self) -> StackState:
        state = StackFolder("default", self.home).load()
        assert state is not None
        return state

    def part(self, name: str) -> Part:
        return next(part for part in self.state.parts if name in (part.name, part.role.value))

    def kill(self, name: str) -> None:
        """`kill -9`, and wait until it is gone."""
        process = psutil.Process(self.part(name).process.pid)
        process.kill()
        psutil.wait_procs([process], timeout=10)

    def gea(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ops.cli", *arguments],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        """Run a command that must succeed, and return its object."""
        answer = self.gea(*arguments, "--json")
        assert answer.returncode == 0, answer.stderr
        found = json.loads(answer.stdout.splitlines()[-1])
        assert isinstance(found, dict)
        return found

    def start_worker(self, pool: str, name: str) -> subprocess.Popen[bytes]:
        """Start one more worker of the stack by the operator's command."""
        addresses = {
            "GEA_KAFKA_BOOTSTRAP": self.state.bootstrap,
            "GEA_REDIS_URL": self.state.redis_url,
        }
        log = (self.home / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "ops.cli", "worker", pool, "--config", self.state.config, "--name", name],
            env=self.environ | addresses,
            stderr=log,
            stdout=subprocess.DEVNULL,
        )
        log.close()
        self.started.append(process)
        return process


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeStack]:
    """A stack with the demo's knowledge; stopped afterwards, whatever the tests left of it."""
    require_whole_stack()
    home = tmp_path_factory.mktemp("whole") / "home"
    made = WholeStack(home, stack_environment(home, ROOT))
    try:
        answer = made.gea("up", "--detach", "--json")
        assert answer.returncode == 0, answer.stderr
        yield made
    finally:
        for process in made.started:
            process.terminate()
            process.wait(timeout=30)
        made.gea("down", "--all", "--purge")
