"""Quix Streams as a process of the comparison. Runs in the peers' own environment: needs Quix and nothing of ours.

At-least-once is its default: results are flushed before their offsets are committed. It handles one message at a time.
"""

from __future__ import annotations

import sys
import time

from quixstreams import Application


def work(value: bytes) -> bytes:
    """Do what an item asks for: its first field is a time in microseconds."""
    duration_us = int(value.partition(b":")[0])
    if duration_us:
        time.sleep(duration_us / 1_000_000)
    return value


def main(bootstrap: str, topic: str, group: str, output: str) -> None:
    """Read `topic`, work, write to `output`, until killed."""
    app = Application(
        broker_address=bootstrap,
        consumer_group=group,
        auto_offset_reset="earliest",
        processing_guarantee="at-least-once",
        commit_interval=1.0,
        loglevel=None,
        auto_create_topics=False,
        producer_extra_config={"acks": "all", "linger.ms": 0},
    )
    source = app.topic(topic, key_deserializer="bytes", value_deserializer="bytes")
    target = app.topic(output, key_serializer="bytes", value_serializer="bytes")
    app.dataframe(source).apply(work).to_topic(target)
    app.run()


if __name__ == "__main__":
    main(*sys.argv[1:5])
