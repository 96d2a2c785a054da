"""What every command promises: help, one clear line and a code on failure, one JSON object if asked, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops import acceptance, cli
from ops.commands.stack import parse_replicas, without_password
from ops.errors import CommandError
from schemas.worker import Pool

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    ["demo"], ["up"], ["down"], ["status"], ["ask"], ["chat"], ["tail"], ["replay"], ["cancel"], ["ingest"], ["worker"],
    ["topics", "apply"], ["topics", "show"], ["train", "intent"], ["dlq", "list"], ["dlq", "show"], ["dlq", "redrive"],
    ["bench", "chaos"],
]  # fmt: skip
runner = CliRunner()


@pytest.fixture(autouse=True)
def _no_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stack of the person who runs the tests is seen."""
    monkeypatch.setenv("GEA_HOME", str(tmp_path / "home"))
    for name in ("GEA_CONFIG", "GEA_KAFKA_BOOTSTRAP", "GEA_COLOUR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(command: list[str]) -> None:
    result = runner.invoke(cli.app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize("command", ["e2e", "intent", "retrieval"])
def test_every_measure_explains_itself(command: str) -> None:
    assert runner.invoke(acceptance.app, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    "command",
    [
        ["ask", "x"],
        ["replay", "r-1"],
        ["cancel", "r-1"],
        ["status"],
        ["tail"],
        ["ingest", "."],
        ["topics", "show"],
        ["topics", "apply"],
    ],
    ids=lambda command: command[0],
)
def test_without_a_stack_the_remedy_is_named(command: list[str]) -> None:
    result = runner.invoke(cli.app, command)
    assert result.exit_code == 1
    assert "gea up" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", [["ask", "x"], ["replay", "r-1"], ["cancel", "r-1"], ["status"], ["ingest", "."]])
def test_failure_is_one_json_object_too(command: list[str]) -> None:
    result = runner.invoke(cli.app, [*command, "--json"])
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["error"]["message"]


def test_down_without_a_stack_is_fine() -> None:
    result = runner.invoke(cli.app, ["down", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[-1]) == {"stopped": []}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["up", "--name", "../x"], "stack name"),
        (["up", "--replicas", "intent"], "POOL=N"),
        (["up", "--replicas", "nobody=1"], "router, intent, retrieval, generation"),
        (["up", "--kafka", "nowhere"], "host:port"),
        (["up", "--redis", "http://x"], "redis://"),
        (["ask", "x", "--kafka", "nowhere"], "host:port"),
        (["ask", " ", "--kafka", "127.0.0.1:1"], "prompt"),
        (["ask", "x", "--kafka", "127.0.0.1:1", "--max-tokens", "0"], "max_tokens"),
        (["ask", "x", "--kafka", "127.0.0.1:1", "--session", "a b"], "session_id"),
        (["ask", "x", "--kafka", "127.0.0.1:1", "--reader-lease", "0"], "reader_lease_s"),
        (["cancel", "a b", "--kafka", "127.0.0.1:1"], "request_id"),
        (["cancel", "x", "--kafka", "127.0.0.1:1", "--tenant", "a/b"], "tenant"),
        (["cancel", "x", "--kafka", "127.0.0.1:1", "--reason", "x" * 257], "reason"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_argument_is_named_before_anything_starts(arguments: list[str], named: str, tmp_path: Path) -> None:
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert named in result.stderr
    assert not list((tmp_path / "home").glob("*/stack.json"))


@pytest.mark.parametrize("module", ["ops.cli", "ops.acceptance"])
@pytest.mark.parametrize("words", [["bogus"], ["--bogus"]], ids=" ".join)
def test_wrong_use_is_one_line_and_one_json_object(module: str, words: list[str]) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", module, *words, "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert words[0] in line
    assert "--help" in line
    assert json.loads(answer.stdout)["error"]["code"] == "wrong_use"


def test_kafka_that_is_away_is_told_in_one_line(unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    command = [sys.executable, "-m", "ops.cli", "status", "--kafka", address]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    (line,) = answer.stderr.splitlines()
    assert address in line


def test_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GEA_HOME", str(tmp_path / "file" / "home"))
    result = runner.invoke(cli.app, ["up", "--json"])
    assert result.exit_code == 1
    assert f"{tmp_path}/file/home" in json.loads(result.stdout)["error"]["message"]


@pytest.mark.parametrize("measure", ["e2e", "intent", "retrieval"])
def test_data_set_that_is_none_is_named(measure: str, tmp_path: Path) -> None:
    path = tmp_path / "garbage.jsonl"
    path.write_text("garbage\n")
    result = runner.invoke(acceptance.app, [measure, "--dataset", str(path)])
    assert result.exit_code == 1
    assert str(path) in result.stderr


def test_e2e_asks_no_question_of_a_kafka_that_is_away(unused_tcp_port: int) -> None:
    address = f"127.0.0.1:{unused_tcp_port}"
    result = runner.invoke(acceptance.app, ["e2e", "--kafka", address])
    assert result.exit_code == 1
    assert address in result.stderr


def test_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEA_BATCHING_BATCH_SIZE", "0")
    result = runner.invoke(cli.app, ["up"])
    assert result.exit_code == 1
    assert "batching.batch_size" in result.stderr


def test_stack_that_died_is_told_with_its_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "default"
    folder.mkdir(parents=True)
    state = {"id": "x", "name": "default", "folder": str(folder), "is_ready": True, "parts": []}
    (folder / "stack.json").write_text(json.dumps(state))
    result = runner.invoke(cli.app, ["status"])
    assert result.exit_code == 1
    assert "gea down" in result.stderr


def test_replicas_are_read_by_pool() -> None:
    assert parse_replicas(["intent=2", "router=0"]) == {Pool.INTENT: 2, Pool.ROUTER: 0}
    with pytest.raises(CommandError):
        parse_replicas(["intent=65"])


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("rediss://user:secret@host/0", "rediss://user@host/0"),
        ("redis://:secret@host", "redis://@host"),
        ("", ""),
    ],
)
def test_password_of_redis_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("module", ["ops.cli", "ops.acceptance", "ops.answering", "ops.ingest", "ops.up", "ops.e2e"])
def test_torch_is_not_imported_by_commands(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'faiss'}} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_help_loads_no_kafka_client() -> None:
    script = "import sys, ops.cli; print('aiokafka' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
