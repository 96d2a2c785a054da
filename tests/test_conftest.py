"""Which tests run in one process, one after another, where a run is spread over several."""

from __future__ import annotations

import pytest

from tests.conftest import scope_of


@pytest.mark.parametrize(
    ("file", "scope"),
    [
        ("tests/chaos/test_faults_real.py", "servers"),
        ("tests/kafka/test_kafka_contract.py", "servers"),
        ("tests/ops/test_demo_whole.py", "servers"),
        ("tests/streams/test_store_redis.py", "servers"),
        ("tests/workers/intent/test_model.py", "weights"),
        ("tests/workers/generation/engine/test_exact_model.py", "weights"),
        ("tests/schemas/test_ranges.py", "tests/schemas/test_ranges.py"),
    ],
)
def test_what_uses_servers_or_weights_is_one_scope_and_any_other_file_its_own(file: str, scope: str) -> None:
    assert scope_of(file) == scope
