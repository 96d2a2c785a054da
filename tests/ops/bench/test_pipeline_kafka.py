"""The pipeline bench on a real Kafka, as short as it goes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ops.cli import app
from tests.real_parts import require_servers


@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.slow
def test_the_bench_carries_requests_and_prints_its_figures_as_json() -> None:
    require_servers()
    short = ["--no-peers", "--requests", "50", "--alone", "10", "--repeats", "1", "--window", "0.5", "--json"]
    ended = CliRunner().invoke(app, ["bench", "pipeline", *short])
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["load"]["requests_per_s"] > 0
    assert found["load"]["token_records_per_s"] > found["load"]["requests_per_s"]
    assert set(found["idle"]["hops_ms"]) >= {"client_router", "generation_client"}
    assert [found["work"][name]["gea"]["items_per_s"] > 0 for name in ("0_ms", "10_ms", "100_ms", "500_ms")] == [
        True
    ] * 4
