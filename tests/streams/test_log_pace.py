"""A library that repeats itself does not fill the log."""

from __future__ import annotations

import logging

from streams.log_pace import LogPace


def record(name: str, line: int) -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, "client.py", line, "Unable connect to %s", ("x",), None)


def test_a_place_of_the_kafka_client_speaks_once_in_a_while_and_counts_what_was_held_back() -> None:
    now_s = 0.0
    pace = LogPace(pause_s=10, clock=lambda: now_s)
    assert [pace.filter(record("aiokafka.consumer", 7)) for _ in range(400)] == [True, *[False] * 399]
    assert pace.filter(record("aiokafka", 8))
    now_s = 10.0
    again = record("aiokafka.consumer", 7)
    assert pace.filter(again)
    assert vars(again)["num_held_back"] == 399
    assert not pace.filter(record("aiokafka.consumer", 7))


def test_our_own_events_are_never_held_back() -> None:
    pace = LogPace(pause_s=10, clock=lambda: 0.0)
    assert all(pace.filter(record("workers.outbox", 7)) for _ in range(400))
