"""The names of topics and groups, and how the topics are made.

Names only. Partition counts are fixed at creation: adding partitions later would move keys.
"""

from __future__ import annotations

from schemas.errors import ConfigError
from schemas.request import ID_PATTERN
from schemas.worker import Pool
from streams.broker import TopicSpec

HOUR_MS = 3_600_000
TOKEN_RETENTION_MS = 6 * HOUR_MS
TOKEN_SEGMENT_MS = 600_000  # retention works on closed segments: a small one keeps expiry near its time
MAX_MESSAGE_BYTES = 1_048_588  # 1 MiB of value and the framing that Kafka counts, its own default

REQUESTS = "gea.requests"
TOKENS = "gea.tokens"
DOCUMENTS = "gea.documents"
WORKERS = "gea.workers"
ROUTES = "gea.routes"
DEAD_LETTER = "gea.dead-letter"
CONTROL = "gea.control"
RETRY_SHORT = "gea.retry.5s"
RETRY_LONG = "gea.retry.60s"
RETRY_DELAYS_S = {RETRY_SHORT: 5, RETRY_LONG: 60}

COMPACTED = (("cleanup.policy", "compact"), ("max.message.bytes", str(MAX_MESSAGE_BYTES)))
# Heartbeats come each second: small segments, so that compaction keeps up and a reader's start stays short.
HEARTBEATS = (*COMPACTED, ("segment.ms", str(TOKEN_SEGMENT_MS)), ("delete.retention.ms", str(TOKEN_SEGMENT_MS)))
PLAIN = (("cleanup.policy", "delete"), ("max.message.bytes", str(MAX_MESSAGE_BYTES)))
EXPIRING = (*PLAIN, ("retention.ms", str(TOKEN_RETENTION_MS)), ("segment.ms", str(TOKEN_SEGMENT_MS)))
KEPT = (*PLAIN, ("retention.ms", "-1"))


def pool_topic(pool: Pool, colour: str) -> str:
    """Return the topic that a pool of one colour reads; the router reads `REQUESTS`."""
    return REQUESTS if pool is Pool.ROUTER else f"gea.{pool}.{_checked(colour)}"


def pool_group(pool: Pool, colour: str) -> str:
    """Return the consumer group of a pool of one colour."""
    return f"gea-{pool}-{_checked(colour)}"


def is_pool_topic(topic: str) -> bool:
    """Return whether a name is that of a pool's topic behind the router, in some colour."""
    prefix, _, rest = topic.partition(".")
    pool, _, colour = rest.partition(".")
    is_pool = prefix == "gea" and pool in (Pool.INTENT, Pool.RETRIEVAL, Pool.GENERATION)
    return is_pool and bool(ID_PATTERN.fullmatch(colour)) and ":" not in colour


def is_token_topic(topic: str) -> bool:
    """Return whether a name is that of a topic of token streams: the default one, or a tenant's own."""
    return topic == TOKENS or (topic.startswith(f"{TOKENS}.") and bool(ID_PATTERN.fullmatch(topic, len(TOKENS) + 1)))


def retry_group(topic: str) -> str:
    """Return the consumer group of the routers on a retry topic."""
    return f"gea-router-retry-{topic.rpartition('.')[2]}"


def topic_specs(partitions: int, replication: int = 1, colours: tuple[str, ...] = ("blue",)) -> tuple[TopicSpec, ...]:
    """Return every topic of the installation; `partitions` is the count on the request path and for tokens."""
    small = min(partitions, 4)  # views that every worker reads whole: more partitions only cost connections
    pools = [pool_topic(pool, colour) for pool in Pool if pool is not Pool.ROUTER for colour in colours]
    wide = [(REQUESTS, PLAIN), *((topic, PLAIN) for topic in pools), (TOKENS, EXPIRING)]
    narrow = [(DOCUMENTS, COMPACTED), (WORKERS, HEARTBEATS), (ROUTES, COMPACTED), (DEAD_LETTER, KEPT)]
    narrow += [(CONTROL, EXPIRING), *((topic, PLAIN) for topic in RETRY_DELAYS_S)]
    return tuple(
        TopicSpec(name=name, num_partitions=count, replication=replication, settings=settings)
        for topics, count in ((wide, partitions), (narrow, small))
        for name, settings in topics
    )


def _checked(colour: str) -> str:
    if not ID_PATTERN.fullmatch(colour) or ":" in colour:
        raise ConfigError(f"colour: {colour!r} is not allowed: 1 to 128 letters, digits, '.', '_' or '-'")
    return colour
