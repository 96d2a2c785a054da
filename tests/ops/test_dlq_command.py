"""`gea dlq` as people and scripts use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from ops import cli
from ops.commands import dlq
from ops.dlq import DeadLetterLog
from schemas.codec import pack
from streams.memory import MemoryBroker
from streams.topics import REQUESTS
from tests.ops.letters import ROUTED, UNREADABLE, Grave

runner = CliRunner()


@pytest.fixture
def grave(monkeypatch: pytest.MonkeyPatch) -> Grave:
    """Three letters, found without a stack."""

    async def fill() -> Grave:
        grave = await Grave.dig()
        await grave.bury(b"\xc1\x1b[2J", error=UNREADABLE)
        await grave.bury()
        await grave.bury(pack(ROUTED), (("request_id", b"r-routed"),), topic="gea.generation.blue", key=b"s-1")
        return grave

    made = asyncio.run(fill())

    @asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[tuple[MemoryBroker, DeadLetterLog]]:
        yield made.broker, await DeadLetterLog.open(made.broker)

    monkeypatch.setattr(dlq, "_opened", opened)
    return made


def gea(*arguments: str, code: int = 0) -> Any:
    """Run a command and return its JSON object."""
    result = runner.invoke(cli.app, ["dlq", *arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.usefixtures("grave")
def test_a_list_has_reason_origin_age_and_size() -> None:
    rows = gea("list")["letters"]
    assert {row["code"] for row in rows} == {"undecodable", "internal"}
    row = next(row for row in rows if row["request_id"] == "r-routed")
    assert (row["topic"], row["partition"], row["message"]) == ("gea.generation.blue", row["partition"], "boom")
    assert row["bytes"] == len(pack(ROUTED))
    result = runner.invoke(cli.app, ["dlq", "list"], env={"COLUMNS": "220"})
    assert result.exit_code == 0
    assert "gea.generation.blue" in result.stdout
    assert "3 dead letters fit" in result.stderr


@pytest.mark.usefixtures("grave")
def test_a_limit_keeps_the_newest_and_says_how_many_there_are() -> None:
    report = gea("list", "--limit", "1")
    assert (report["found"], report["shown"]) == (3, 1)
    assert gea("list", "--code", "undecodable")["found"] == 1
    assert gea("list", "--since", "1h")["found"] == 3
    assert gea("list", "--until", "1h")["found"] == 0
    assert gea("list", "--since", "2999-01-01")["found"] == 0


@pytest.mark.usefixtures("grave")
def test_one_letter_is_shown_whole_by_its_place() -> None:
    place = gea("list", "--request-id", "r-routed")["letters"][0]["place"]
    (row,) = gea("show", place)["letters"]
    assert row["body"]["decoded"]["request"]["prompt"] == "hello"
    result = runner.invoke(cli.app, ["dlq", "show", place])
    assert '"prompt": "hello"' in result.stdout
    assert gea("show", "1:99999", code=1)["error"]["code"] == "not_found"
    undecodable = runner.invoke(cli.app, ["dlq", "show", "--code", "undecodable"])
    assert "\x1b" not in undecodable.output


def test_a_redrive_prints_new_ids_and_a_second_one_skips(grave: Grave) -> None:
    before = len(grave.broker.records(REQUESTS))
    dry = gea("redrive", "--code", "internal", "--dry-run")
    assert (dry["sent"], dry["dry_run"], len(grave.broker.records(REQUESTS))) == (2, True, before)
    report = gea("redrive", "--code", "internal")
    assert [row["request_id"] for row in report["letters"]] == [row["request_id"] for row in dry["letters"]]
    assert len(grave.broker.records(REQUESTS)) == before + 2
    again = gea("redrive", "--code", "internal")
    assert (again["sent"], again["skipped"]) == (0, 2)
    assert gea("list", "--code", "internal")["letters"][0]["redriven_as"]
    result = runner.invoke(cli.app, ["dlq", "redrive", "--code", "internal", "--again"])
    assert result.exit_code == 0
    assert report["letters"][0]["request_id"] in result.stderr


@pytest.mark.usefixtures("grave")
def test_what_cannot_be_redriven_is_named_and_the_exit_code_is_one() -> None:
    report = gea("redrive", "--all", code=1)
    assert (report["sent"], report["refused"], report["error"]["code"]) == (2, 1, "refused")
    assert "undecodable" in next(row["reason"] for row in report["letters"] if row["outcome"] == "refused")
    assert gea("redrive", "--code", "undecodable", "--force")["sent"] == 1


@pytest.mark.usefixtures("grave")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["redrive"], "--all"),
        (["redrive", "--all", "--force"], "--force"),
        (["redrive", "--request-id", "nobody"], "no dead letter fits"),
        (["show", "x"], "0:17"),
        (["show", "0:-1"], "place"),
        (["list", "--since", "yesterday"], "--since"),
        (["list", "--until", "5x"], "--until"),
        (["list", "--limit", "0"], "limit"),
    ],
)
def test_wrong_use_is_named(arguments: list[str], named: str) -> None:
    result = runner.invoke(cli.app, ["dlq", *arguments])
    assert result.exit_code != 0
    assert named in result.output
    assert "Traceback" not in result.output


def test_without_a_stack_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("GEA_HOME", str(tmp_path))
    for name in ("GEA_CONFIG", "GEA_KAFKA_BOOTSTRAP"):
        monkeypatch.delenv(name, raising=False)
    for arguments in (["list"], ["show"], ["redrive", "--all"]):
        assert "gea up" in gea(*arguments, code=1)["error"]["message"]
        assert runner.invoke(cli.app, ["dlq", arguments[0], "--help"]).exit_code == 0
