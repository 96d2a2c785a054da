"""What an installation under fuzz is asked for in memory and on Kafka alike."""

from __future__ import annotations

from schemas.worker import Pool
from streams.topics import RETRY_DELAYS_S, pool_group, pool_topic, retry_group

MAX_SLOWDOWN = 2.5  # caches and clocks of shared machines; what never recovers is slower by far


def groups() -> dict[str, str]:
    """Return the topics that groups read."""
    pools = {pool_topic(pool, "blue"): pool_group(pool, "blue") for pool in Pool}
    return pools | {topic: retry_group(topic) for topic in RETRY_DELAYS_S}
