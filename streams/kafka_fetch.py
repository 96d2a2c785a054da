"""Fetches records so that one that aiokafka cannot read stops nobody.

aiokafka decodes header names strictly: a name that is no UTF-8 makes `getmany` raise, for ever, and what it had taken
out of its buffers before is lost. Here nothing is lost: positions are put back, the records before the unreadable one
are read one by one, and in its place stands a record without a value, for the dead letters. The same goes for those
behind it in its batch, which its producer wrote together with it: aiokafka reads a batch from its beginning only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from streams.broker import Record
from streams.kafka_client import our_place, our_records

log = structlog.get_logger(__name__)


class Fetch:
    """`getmany` of one consumer. One task calls it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._suspects: dict[Any, int] = {}  # by partition, the offset that could not be read

    async def __call__(self, timeout_ms: int, max_records: int) -> list[Record]:
        """Return the next records. Raises what `getmany` raises, with all positions as before."""
        self._suspects = {place: at for place, at in self._suspects.items() if place in self._client.assignment()}
        before = self._positions()
        try:
            fetched = await self._client.getmany(
                timeout_ms=timeout_ms, max_records=1 if self._suspects else max_records
            )
        except UnicodeDecodeError:
            return self._step_over(before)
        except Exception:
            self._put_back(before)
            raise
        for place, records in fetched.items():
            if records and records[-1].offset >= self._suspects.get(place, 2**63):
                del self._suspects[place]
        return our_records(fetched)

    def _step_over(self, before: Mapping[Any, int]) -> list[Record]:
        unreadable = self._unreadable()
        self._put_back(before)
        stepped_over = []
        for place, offset in unreadable.items():
            if offset > before.get(place, offset):
                self._suspects[place] = offset  # those before it come first
                continue
            self._suspects.pop(place, None)
            self._client.seek(place, offset + 1)
            log.error("record_unreadable", topic=place.topic, partition=place.partition, offset=offset)
            stepped_over.append(
                Record(**our_place(place)._asdict(), offset=offset, timestamp_ms=0, key=None, value=None)
            )
        return stepped_over

    def _unreadable(self) -> dict[Any, int]:
        """Return where the reading of a fetched batch broke off: its generator is finished, but was not used up."""
        found = {}
        for place, result in self._client._fetcher._records.items():
            records = getattr(result, "_partition_records", None)
            iterator = getattr(records, "_records_iterator", None)
            if records is not None and iterator is not None and iterator.gi_frame is None:
                found[place] = records.next_fetch_offset
        return found

    def _positions(self) -> dict[Any, int]:
        assignment = self._client._subscription.subscription
        states = assignment.assignment if assignment is not None else None
        if states is None:
            return {}
        found = {place: states.state_value(place) for place in states.tps}
        return {
            place: state.position for place, state in found.items() if state is not None and state.has_valid_position
        }

    def _put_back(self, before: Mapping[Any, int]) -> None:
        now = self._positions()
        for place, offset in before.items():
            if place in now and (now[place] != offset or place in self._unreadable()):
                self._client.seek(place, offset)
