"""The router pool: read → recognise repeats → admit → stamp → forward.

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
    UnavailableError,
)
from schemas.request import GenerationRequest
from schemas.tokens import See
from schemas.worker import Pool
from streams.broker import Broker
from streams.clock import now_ms
from streams.delivery import Delivery
from streams.directory import Directory
from streams.session import Marker, SessionStore
from streams.telemetry import bind_request, child_traceparent
from workers.handler import refusal_epoch, refuse_record, request_id_of
from workers.outbox import Outbox
from workers.router.admission import DoorLimits, check_load, deadline_of, load_of, read_request, reply_of, stamp
from workers.router.retry_mover import RetryMover
from workers.router.routes import RouteBook, RouteFollower
from workers.router.stream_ends import StreamEnds
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
    ) -> None:
        self._outbox = outbox
        self._sessions = sessions
        self._directory = directory
        self._limits = limits
        self._book = RouteBook()
        self._ends = StreamEnds(broker, limits.num_token_partitions)
        self._mover = mover
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
        if self._mover is not None:
            await self._mover.start()

    async def handle(self, batch: Sequence[Delivery]) -> None:
        """Route a batch."""
        await asyncio.gather(*(self._route(delivery) for delivery in batch))

    def snapshot(self) -> StageSnapshot:
        """Return nothing special: the router has no steps."""
        return StageSnapshot()

    async def probe(self) -> float | None:
        """Return None: there is no step to measure."""
        return None

    async def stop(self) -> None:
        """Stop following, and leave waiting retries to the next router. Idempotent."""
        if self._mover is not None:
            await self._mover.stop()
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
            origin = Origin(partition=record.partition, offset=record.offset)
            await self._admit(delivery, headers, request, origin, reply)

    async def _admit(
        self,
        delivery: Delivery,
        headers: RequestHeaders,
        request: GenerationRequest,
        origin: Origin,
        reply: Reply,
    ) -> None:
        """Forward a valid request, point a repeat to the first one's stream, or refuse it for its time or our load."""
        marker = Marker(origin=origin, reply=reply, tenant=headers.tenant)
        known = await self._sessions.mark(headers.request_id, marker)
        if known.origin != origin:
            await self._point(delivery, headers, reply, known)
            return
        try:
            deadline_ms = deadline_of(headers, self._limits, now_ms())
            if not delivery.is_takeover:
                check_load(load_of(self._directory.workers(Pool.GENERATION)), self._limits)
            await self._outbox.forward(self._stamped(headers, request, origin, known.reply, deadline_ms))
        except (InvalidRequestError, RejectedError) as error:
            await self._end(delivery, reply, headers.request_id, error)
            await self._sessions.unmark(headers.request_id)

    async def _point(self, delivery: Delivery, headers: RequestHeaders, reply: Reply, known: Marker) -> None:
        if known.tenant != headers.tenant:
            await self._outbox.dead_letter(
                delivery.record, InvalidRequestError("request_id: in use by another tenant", field="request_id")
            )
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
        known = await self._sessions.marker(request_id)
        if known is None:
            await self._end(delivery, reply, request_id, error)
        elif headers is not None and known.tenant == headers.tenant:
            await self._point(delivery, headers, reply, known)
        return known is None

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
        self, headers: RequestHeaders, request: GenerationRequest, origin: Origin, reply: Reply, deadline_ms: int
    ) -> RoutedRequest:
        key = f"{headers.tenant}/{request.session_id or headers.request_id}"
        routed = stamp(
            headers,
            request,
            origin=origin,
            reply=reply,
            route=self._book.stamp(key),
            deadline_ms=deadline_ms,
            now_ms=now_ms(),
            traceparent=child_traceparent(headers.traceparent),
        )
        log.info("routed", colour=routed.route.generation, tenant=headers.tenant, session_id=request.session_id)
        return routed
