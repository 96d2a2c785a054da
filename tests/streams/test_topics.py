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


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("gea.generation.blue", True),
        ("gea.intent.v1.2", True),
        ("gea.retrieval.green", True),
        ("gea.router.blue", False),
        ("gea.generation.", False),
        ("gea.generation", False),
        ("gea.generation.a:b", False),
        ("gea.generation.a/b", False),
        ("gea.retry.5s", False),
        ("gea.requests", False),
        ("other.generation.blue", False),
        ("", False),
    ],
)
def test_a_pool_topic_is_known_by_its_name(topic: str, expected: bool) -> None:
    assert topics.is_pool_topic(topic) is expected


def test_each_retry_topic_has_a_group_of_its_own() -> None:
    assert [topics.retry_group(topic) for topic in topics.RETRY_DELAYS_S] == [
        "gea-router-retry-5s",
        "gea-router-retry-60s",
    ]
