"""Names of topics and groups."""

from __future__ import annotations

import pytest

from schemas.errors import ConfigError
from schemas.worker import Pool
from streams import topics


def test_each_pool_and_colour_has_its_topic_and_group() -> None:
    assert topics.pool_topic(Pool.GENERATION, "green") == "gea.generation.green"
    assert topics.pool_topic(Pool.ROUTER, "blue") == "gea.requests"
    assert topics.pool_group(Pool.ROUTER, "blue") == "gea-router-blue"
    with pytest.raises(ConfigError, match="colour"):
        topics.pool_group(Pool.INTENT, "blue/green")


def test_tokens_expire_and_views_are_compacted() -> None:
    specs = {spec.name: spec for spec in topics.topic_specs(64, 3)}
    tokens = dict(specs[topics.TOKENS].settings)
    assert tokens["cleanup.policy"] == "delete"
    assert 0 < int(tokens["segment.ms"]) < int(tokens["retention.ms"]) == 6 * 3_600_000
    for name in (topics.DOCUMENTS, topics.WORKERS, topics.ROUTES):
        assert dict(specs[name].settings)["cleanup.policy"] == "compact"
    assert specs[topics.REQUESTS].num_partitions == specs[topics.TOKENS].num_partitions == 64
    assert {spec.replication for spec in specs.values()} == {3}
    assert "gea.intent.blue" in specs
