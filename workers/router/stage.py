"""The router pool: read → recognise repeats → wait for room → stamp → forward.

A request that is refused gets a terminal record with a code; a record that is no message goes to the dead letters. The
same origin is always forwarded again (claims make that harmless); another origin with a known request_id is a repeat
and gets a pointer to the first one's stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from schemas.envelope import Origin, Reply, RequestHeaders, RoutedRequest, parse_request_headers
from schemas.errors import (
    ConfigError,
    DecodeError,
    GeaError,
    InternalError,
    InvalidRequestError,
    RejectedError,
    RequestCancelledError,
    UnavailableError,
)
from schemas.request import GenerationRequest
from schemas.tokens import See
from schemas.worker import Pool
from streams.broker import Broker
from streams.cancellations import Cancellations
from streams.clock import now_ms
from streams.delivery import Delivery
from streams.directory import Directory
from streams.session import Marker, SessionStore
from streams.telemetry import bind_request, child_traceparent
from workers.handler import handle_each, refusal_epoch, refuse_id_in_use, refuse_record, request_id_of
from workers.outbox import Outbox
from workers.router.admission import DoorLimits, check_load, deadline_of, load_of, read_request, reply_of, stamp
from workers.router.cost import estimate_tokens
from workers.router.known_requests import KnownRequests
from workers.router.retry_mover import RetryMover
from workers.router.room import Room
from workers.router.routes import RouteBook, RouteFollower
from workers.router.stream_ends import StreamEnds
from workers.router.waiting_room import RoomLimits, Ticket, WaitingRoom
from workers.stage import StageSnapshot

log = structlog.get_logger(__name__)


class RouterHandler:
    """Routes requests; the `Handler` of the router pool."""

    def __init__(
        self,
        broker: Broker,
        outbox: Outbox,
        sessions: SessionStore,
        directory: Directory,
        *,
        limits: DoorLimits,
        mover: RetryMover | None = None,
        cancellations: Cancellations | None = None,
        room_limits: RoomLimits = RoomLimits(),  # noqa: B008 - frozen
    ) -> None:
        self._outbox = outbox
        self._known = KnownRequests(sessions)
        self._directory = directory
        self._limits = limits
        self._book = RouteBook()
        self._ends = StreamEnds(broker, limits.num_token_partitions)
        self._mover = mover
        room = Room(
            directory,
            max_tokens_per_worker=room_limits.max_tokens_per_worker,
            max_queue_depth=limits.max_queue_depth,
        )
        self._waiting = WaitingRoom(room, limits=room_limits, cancellations=cancellations)
        self._routes = RouteFollower(broker, self._book)

    @property
    def pool(self) -> Pool:
        """Return the router pool."""
        return Pool.ROUTER

    async def start(self) -> None:
        """Read the route tables, the directory of workers and the ends of the token topics."""
        await self._routes.start()
        await self._directory.start()
        await self._ends.start()
        self._waiting.start()
        if self._mover is not None:
            await self._mover.start()

    async def handle(self, batch: Sequence[Delivery]) -> None:
        """Route a batch, each request in its own task, which ends if its partition is lost."""
        await handle_each((delivery, self._route(delivery)) for delivery in batch)

    def snapshot(self) -> StageSnapshot:
        """Return how many wait; the router has no steps."""
        return StageSnapshot(num_queued=len(self._waiting), num_unbegun=len(self._waiting))

    async def probe(self) -> float | None:
        """Return None: there is no step to measure."""
        return None

    async def stop(self) -> None:
        """Stop following, and leave waiting retries to the next router. Idempotent."""
        if self._mover is not None:
            await self._mover.stop()
        await self._waiting.close()
        await self._routes.close()
        await self._ends.close()
        await self._directory.close()

    async def _route(self, delivery: Delivery) -> None:
        record = delivery.record
        request_id = request_id_of(record)
        if request_id is None:
            await refuse_record(
                self._outbox,
                delivery,
                InvalidRequestError("header request_id: missing or malformed", field="request_id"),
            )
            return
        with bind_request(request_id):
            try:
                await self._decide(delivery, request_id)
            except (UnavailableError, ConfigError):
                raise  # the record is not to blame
            except Exception as error:
                log.exception("routing_failed")
                await self._outbox.dead_letter(record, InternalError(f"{type(error).__name__}: {error}"))
                await self._refuse(delivery, request_id, InternalError("the request could not be routed"))
        delivery.done()

    async def _decide(self, delivery: Delivery, request_id: str) -> None:
        """Admit a record, or refuse what is no request or breaks a rule."""
        record = delivery.record
        try:
            headers = parse_request_headers(record.headers)
            reply = self._reply(headers)
            request = read_request(record, self._limits)
        except DecodeError as error:
            await self._outbox.dead_letter(record, error)
            await self._refuse(delivery, request_id, error)
        except InvalidRequestError as error:
            if not await self._refuse(delivery, request_id, error):
                await self._outbox.dead_letter(record, error)
        else:
            await self._admit(delivery, headers, request, origin_of(delivery), reply)

    async def _admit(
        self,
        delivery: Delivery,
        headers: RequestHeaders,
        request: GenerationRequest,
        origin: Origin,
        reply: Reply,
    ) -> None:
        """Forward a valid request, point a repeat to the first one's stream, or refuse it for its time or our load."""
        received_ms = now_ms()
        is_takeover = delivery.is_takeover and await self._known.may_be_admitted(headers.request_id)
        known = await self._known.mark(headers.request_id, Marker(origin=origin, reply=reply, tenant=headers.tenant))
        if known.origin != origin:
            await self._point(delivery, headers, reply, known)
            return
        try:
            deadline_ms = deadline_of(headers, self._limits, received_ms)
            if not is_takeover:
                check_load(load_of(self._directory.workers(Pool.GENERATION)), self._limits)
            await self._waiting.turn(self._ticket(headers, request, deadline_ms, is_takeover=is_takeover))
            routed = self._stamped(headers, request, origin, known.reply, deadline_ms, received_ms)
            await self._outbox.forward(routed)
        except (InvalidRequestError, RejectedError, RequestCancelledError) as error:
            await self._end(delivery, reply, headers.request_id, error)
            await self._known.forget(headers.request_id)
        except asyncio.CancelledError:
            self._known.hand_over(headers.request_id)
            raise

    def _ticket(
        self, headers: RequestHeaders, request: GenerationRequest, deadline_ms: int, *, is_takeover: bool
    ) -> Ticket:
        return Ticket(
            request_id=headers.request_id,
            tenant=headers.tenant,
            priority=request.priority,
            tokens=estimate_tokens(request, max_length=self._limits.max_length),
            deadline_ms=deadline_ms,
            reader_lease_s=request.reader_lease_s,
            is_takeover=is_takeover,
        )

    async def _point(self, delivery: Delivery, headers: RequestHeaders, reply: Reply, known: Marker) -> None:
        if known.tenant != headers.tenant:
            await refuse_id_in_use(self._outbox, delivery, headers.request_id, reply, known.reply)
            return
        log.info("repeat", origin_partition=known.origin.partition, origin_offset=known.origin.offset)
        see = See(topic=known.reply.topic, partition=known.reply.partition, offset=known.reply.start)
        await self._outbox.point_to(reply, headers.request_id, see, epoch=refusal_epoch(delivery))

    async def _refuse(self, delivery: Delivery, request_id: str, error: GeaError) -> bool:
        """End a request that cannot be answered; False if its id belongs to another one, which must not be harmed.

        Who repeats his own request that way is pointed to its stream.
        """
        try:
            headers = parse_request_headers(delivery.record.headers)
            reply = self._reply(headers)
        except InvalidRequestError:
            headers, reply = None, self._outbox.default_reply(request_id)
        known = await self._known.marker(request_id)
        is_own = known is None or known.origin == origin_of(delivery)
        if known is None or is_own:
            await self._end(delivery, reply, request_id, error)
        elif headers is not None and known.tenant == headers.tenant:
            await self._point(delivery, headers, reply, known)
        return is_own

    async def _end(self, delivery: Delivery, reply: Reply, request_id: str, error: GeaError) -> None:
        """End a request. What comes later under its id must not take this end for its own, so it begins behind it."""
        written = await self._outbox.end(reply, request_id, error, epoch=refusal_epoch(delivery))
        if written is not None:
            self._ends.note(written)

    def _reply(self, headers: RequestHeaders) -> Reply:
        reply = reply_of(headers, self._outbox.default_reply(headers.request_id), self._limits)
        return Reply(
            topic=reply.topic, partition=reply.partition, start=self._ends.before(reply.topic, reply.partition)
        )

    def _stamped(
        self,
        headers: RequestHeaders,
        request: GenerationRequest,
        origin: Origin,
        reply: Reply,
        deadline_ms: int,
        received_ms: int,
    ) -> RoutedRequest:
        key = f"{headers.tenant}/{request.session_id or headers.request_id}"
        routed = stamp(
            headers,
            request,
            origin=origin,
            reply=reply,
            route=self._book.stamp(key),
            deadline_ms=deadline_ms,
            now_ms=received_ms,
            traceparent=child_traceparent(headers.traceparent),
        )
        log.info("routed", colour=routed.route.generation, tenant=headers.tenant, session_id=request.session_id)
        return routed


def origin_of(delivery: Delivery) -> Origin:
    """Return where a request came from: it tells a repeat from the request itself."""
    return Origin(partition=delivery.record.partition, offset=delivery.record.offset)
