"""What a pool does with the records it is given, as the worker process sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

from schemas.codec import unpack
from schemas.envelope import REQUEST_ID, ROUTED_TYPE, Reply, RoutedRequest, check_type, header
from schemas.errors import (
    ConfigError,
    DeadlineExceededError,
    DecodeError,
    GeaError,
    InvalidRequestError,
    RequestCancelledError,
)
from schemas.ranges import check_routed
from schemas.request import ID_PATTERN
from schemas.tokens import Epoch
from schemas.worker import Pool
from streams.broker import Record
from streams.cancellations import Cancellations
from streams.delivery import Delivery
from streams.racing import end_tasks
from streams.topics import is_token_topic, pool_topic
from workers.outbox import Outbox
from workers.stage import StageSnapshot
from workers.wanted import check_wanted

REFUSAL_HOP = -1


class Handler(Protocol):
    """Takes deliveries and finishes each exactly once: answered, forwarded, or dead-lettered, then `done`."""

    @property
    def pool(self) -> Pool:
        """Return the pool."""
        ...

    async def start(self) -> None:
        """Load and warm."""
        ...

    async def handle(self, batch: Sequence[Delivery]) -> None:
        """Handle a batch; several run at once. Raises only what no single record is to blame for."""
        ...

    def snapshot(self) -> StageSnapshot:
        """Return what the worker's status says about the stage."""
        ...

    async def probe(self) -> float | None:
        """Do a little work that nobody reads and return its time in milliseconds, comparable to `step_ms`.

        None: no step to measure. Asked only while the worker has no other work. Safe to cancel; raises any error.
        """
        ...

    async def stop(self) -> None:
        """Free everything. Idempotent."""
        ...


def decode_routed(record: Record) -> RoutedRequest:
    """Decode a record between the pools. Raises DecodeError or InvalidRequestError."""
    check_type(record.headers, ROUTED_TYPE)
    routed = unpack(record.value, RoutedRequest)
    check_routed(routed)
    if not is_token_topic(routed.reply.topic):
        raise InvalidRequestError(f"reply.topic: {routed.reply.topic!r} is no topic of tokens", field="reply")
    for pool in (Pool.INTENT, Pool.RETRIEVAL, Pool.GENERATION):
        try:
            pool_topic(pool, getattr(routed.route, pool.value))
        except ConfigError as error:  # not our configuration: the record's
            raise InvalidRequestError(f"route.{pool}: {error.message}", field="route") from error
    return routed


def epoch_of(delivery: Delivery, hop: int) -> Epoch:
    """Return the epoch of a run of generation on a delivery."""
    return Epoch(hop, delivery.generation)


def refusal_epoch(delivery: Delivery) -> Epoch:
    """Return the epoch of an end that is written before generation: below every run's.

    So a refusal of a repeat, or of a record that was forwarded before its worker died, never ends a stream that runs.
    """
    return Epoch(REFUSAL_HOP, delivery.generation)


async def refuse_record(outbox: Outbox, delivery: Delivery, error: GeaError) -> None:
    """Dead-letter a record that is no message of ours, end its request if it names one, and acknowledge it."""
    await outbox.dead_letter(delivery.record, error)
    request_id = request_id_of(delivery.record)
    if request_id is not None:
        await outbox.end(outbox.default_reply(request_id), request_id, error, epoch=refusal_epoch(delivery))
    delivery.done()


async def refuse_id_in_use(outbox: Outbox, delivery: Delivery, request_id: str, reply: Reply, owner: Reply) -> None:
    """Put a record aside whose id is another tenant's, and end it where its readers have a place of their own.

    At the owner's place that end would stand in the owner's stream.
    """
    error = InvalidRequestError("request_id: in use by another tenant", field="request_id")
    await outbox.dead_letter(delivery.record, error)
    if (reply.topic, reply.partition) != (owner.topic, owner.partition):
        await outbox.end(reply, request_id, error, epoch=refusal_epoch(delivery))


def request_id_of(record: Record) -> str | None:
    """Return the request_id in a record's headers, None if there is no usable one."""
    try:
        request_id = header(record.headers, REQUEST_ID)
    except InvalidRequestError:
        return None
    return request_id if request_id is not None and ID_PATTERN.fullmatch(request_id) else None


async def decode_batch(
    outbox: Outbox, batch: Sequence[Delivery], cancellations: Cancellations
) -> list[tuple[Delivery, RoutedRequest]]:
    """Decode a batch on its way to generation; what is undecodable, cancelled or late is ended and left out."""
    decoded: list[tuple[Delivery, RoutedRequest]] = []
    for delivery in batch:
        try:
            routed = decode_routed(delivery.record)
        except (DecodeError, InvalidRequestError) as error:
            await refuse_record(outbox, delivery, error)
            continue
        try:
            check_wanted(routed, cancellations)
        except (RequestCancelledError, DeadlineExceededError) as error:
            await end_early(outbox, delivery, routed, error)
            continue
        decoded.append((delivery, routed))
    return decoded


async def end_early(outbox: Outbox, delivery: Delivery, routed: RoutedRequest, error: GeaError) -> None:
    """End a request on its way to generation, and acknowledge it; where nobody can be told, put its record aside."""
    if await outbox.end(routed.reply, routed.request_id, error, epoch=refusal_epoch(delivery)) is None:
        await outbox.dead_letter(delivery.record, error)
    delivery.done()


async def handle_each(work: Iterable[tuple[Delivery, Coroutine[Any, Any, None]]]) -> None:
    """Do the work of each delivery in a task of its own, which ends if its partition is lost.

    Raises the first failure that is no cancellation, at once, however long the others would take still.
    """
    tasks = []
    for delivery, handling in work:
        task = asyncio.create_task(handling)
        delivery.attach(task)
        tasks.append(task)
    try:
        await _until_all_done_or_one_failed(tasks)
    finally:
        await end_tasks(*tasks)


async def _until_all_done_or_one_failed(tasks: Sequence[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
