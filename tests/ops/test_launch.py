"""What a worker process is started with."""

from __future__ import annotations

import pytest

from ops.launch import metrics_environment
from workers.settings import load_settings


@pytest.mark.parametrize(
    ("port", "variables"),
    [
        ("9100", [{"GEA_WORKER_METRICS_PORT": "9100"}, {"GEA_WORKER_METRICS_PORT": "9101"}]),
        ("0", [{}, {}]),
        ("null", [{}, {}]),
    ],
)
def test_workers_of_one_machine_serve_metrics_on_successive_ports(port: str, variables: list[dict[str, str]]) -> None:
    settings = load_settings(None, {"GEA_WORKER_METRICS_PORT": port})
    assert [metrics_environment(settings, number) for number in range(2)] == variables
