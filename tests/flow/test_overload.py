"""More work than the pool can do: shed at the door with a time to come back, fairly shared, lost by nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from schemas.codec import pack, unpack
from schemas.envelope import RoutedRequest
from schemas.errors import RequestFailedError
from schemas.request import GenerationRequest, Priority
from schemas.tokens import EndStatus, Kind
from schemas.worker import Pool
from streams.client import ClientSettings, GeaClient
from streams.settings import ConsumerLimits
from streams.token_reader import decode_token
from streams.topics import REQUESTS, TOKENS, pool_group, pool_topic
from tests.flow.harness import DIALOGUE, Installation, installation
from tests.flow.records import all_committed, view_of
from tests.streams.token_fakes import until
from workers.generation.engine.fake import FakeEngine
from workers.router.stage import RouterHandler
from workers.router.waiting_room import RoomLimits

TEXT = "Within thirty days."
MAX_TOKENS = 58  # with the prompt, 60 tokens by the estimate
TOKENS_OF_ONE = 60
TOPIC = pool_topic(Pool.GENERATION, "blue")
STEP_S = 0.001


class Tap:
    """A pace for the scripted engine: closed until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self) -> None:
        await self.opened.wait()
        await asyncio.sleep(STEP_S)


def narrow(gea: Installation, *, at_once: int, max_waiting: int = 100, tenant_share: float = 0.5) -> None:
    """Let `at_once` requests go to each worker, and the others wait at the door."""
    gea.room_limits = RoomLimits(
        max_waiting=max_waiting, tenant_share=tenant_share, max_tokens_per_worker=at_once * TOKENS_OF_ONE
    )
    gea.consumer_limits = ConsumerLimits(
        batch_size=8, max_wait_ms=1, commit_interval_ms=20, max_in_flight=max_waiting + 64, window=4_096
    )


def tenant(gea: Installation, name: str) -> GeaClient:
    return GeaClient(gea.broker, ClientSettings(timeout_s=20.0, connect_s=0.3, tenant=name))


def ask(
    client: GeaClient, request_id: str, *, priority: Priority = Priority.NORMAL, deadline_s: float = 20.0
) -> asyncio.Task[str]:
    """Ask and return how it ended: the status, or the code of the failure."""

    async def asking() -> str:
        request = GenerationRequest(prompt="tell me", max_tokens=MAX_TOKENS, priority=priority, **DIALOGUE)
        try:
            answer = await client.complete(request, request_id=request_id, deadline_s=deadline_s)
        except RequestFailedError as error:
            return error.failure_code
        assert answer.end is not None
        return answer.end.status

    return asyncio.create_task(asking())


def num_waiting(gea: Installation, name: str = "router-1") -> int:
    handler = gea.workers[name].handler
    assert isinstance(handler, RouterHandler)
    return handler.snapshot().num_queued


def forwarded(gea: Installation) -> list[str]:
    return [unpack(record.value, RoutedRequest).request_id for record in gea.broker.records(TOPIC)]


def ends_in_order(gea: Installation) -> list[str]:
    records = gea.broker.records(TOKENS)
    return [(r.key or b"").decode() for r in records if decode_token(r).kind is Kind.END]


async def holds(is_true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that takes heartbeats."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "did not come about"
        await asyncio.sleep(0.005)


async def test_overload_is_shed_at_the_door_and_nothing_times_out_inside() -> None:
    engine = FakeEngine(TEXT, pause=Tap(), max_sequences=4)
    async with installation() as gea, gea.client() as client:
        narrow(gea, at_once=4, max_waiting=20)
        await gea.start_all(engine)
        asked = {f"r-{number}": ask(client, f"r-{number}") for number in range(120)}
        await holds(lambda: sum(task.done() for task in asked.values()) >= 90)
        tap = engine._pause
        assert isinstance(tap, Tap)
        tap.opened.set()
        results = {name: await task for name, task in asked.items()}
        assert set(results.values()) == {EndStatus.COMPLETED, "overloaded"}
        completed = [name for name, result in results.items() if result == EndStatus.COMPLETED]
        assert 20 <= len(completed) <= 30
        assert sorted(completed) == sorted(forwarded(gea))
        for name, result in results.items():
            end = view_of(gea, name).end
            assert end is not None
            if result == "overloaded":
                assert end.failure is not None
                assert end.failure.retry_after_s is not None
                assert 1 <= end.failure.retry_after_s <= 60
        assert sorted(ends_in_order(gea)) == sorted(asked)
        await all_committed(gea, REQUESTS, Pool.ROUTER)


async def test_a_flood_of_one_tenant_makes_another_wait_for_a_turn_only() -> None:
    tap = Tap()
    async with installation() as gea, tenant(gea, "flood") as flood, tenant(gea, "calm") as calm:
        narrow(gea, at_once=4, max_waiting=200)
        await gea.start_all(FakeEngine(TEXT, pause=tap, max_sequences=4))
        flooding = [ask(flood, f"flood-{number}") for number in range(100)]
        await holds(lambda: num_waiting(gea) >= 95)
        waiting = ask(calm, "calm-1")
        await holds(lambda: num_waiting(gea) >= 96)
        num_before = len(forwarded(gea))
        tap.opened.set()
        assert await waiting == EndStatus.COMPLETED
        assert forwarded(gea).index("calm-1") - num_before <= 2 * 1_024 // TOKENS_OF_ONE + 1
        assert set(await asyncio.gather(*flooding)) == {EndStatus.COMPLETED}


async def test_a_flood_that_fills_the_room_gives_places_up_to_another_tenant() -> None:
    tap = Tap()
    async with installation() as gea, tenant(gea, "flood") as flood, tenant(gea, "calm") as calm:
        narrow(gea, at_once=2, max_waiting=10)
        await gea.start_all(FakeEngine(TEXT, pause=tap, max_sequences=2))
        flooding = [ask(flood, f"flood-{number}") for number in range(40)]
        await holds(lambda: sum(task.done() for task in flooding) >= 20)
        waiting = ask(calm, "calm-1")
        await holds(lambda: gea.workers["router-1"].worker.status().num_queued == 10)
        tap.opened.set()
        assert await waiting == EndStatus.COMPLETED
        assert set(await asyncio.gather(*flooding)) == {EndStatus.COMPLETED, "overloaded"}


async def test_a_more_urgent_request_overtakes_those_that_wait() -> None:
    tap = Tap()
    async with installation() as gea, gea.client() as client:
        narrow(gea, at_once=2)
        await gea.start_all(FakeEngine(TEXT, pause=tap, max_sequences=2))
        lazy = [ask(client, f"low-{number}", priority=Priority.LOW) for number in range(20)]
        await holds(lambda: num_waiting(gea) >= 17)
        urgent = ask(client, "high", priority=Priority.HIGH)
        await holds(lambda: num_waiting(gea) >= 18)
        num_before = len(forwarded(gea))
        tap.opened.set()
        assert await urgent == EndStatus.COMPLETED
        assert forwarded(gea).index("high") <= num_before + 1
        assert set(await asyncio.gather(*lazy)) == {EndStatus.COMPLETED}


async def test_a_request_that_waits_at_the_door_can_be_cancelled_and_has_its_deadline() -> None:
    tap = Tap()
    async with installation() as gea, gea.client() as client:
        narrow(gea, at_once=1)
        await gea.start_all(FakeEngine(TEXT, pause=tap))
        first = ask(client, "first")
        await holds(lambda: forwarded(gea) == ["first"])
        cancelled, late = ask(client, "cancelled"), ask(client, "late", deadline_s=0.3)
        await holds(lambda: num_waiting(gea) == 2)
        await client.cancel("cancelled")
        assert await cancelled == EndStatus.CANCELLED
        assert await late == "deadline_exceeded"
        assert forwarded(gea) == ["first"]
        tap.opened.set()
        assert await first == EndStatus.COMPLETED
        assert [ends_in_order(gea).count(name) for name in ("first", "cancelled", "late")] == [1, 1, 1]
        await all_committed(gea, REQUESTS, Pool.ROUTER)


@pytest.mark.parametrize("is_killed", [True, False])
async def test_what_waits_in_a_router_that_goes_is_taken_over_by_the_next(is_killed: bool) -> None:
    tap = Tap()
    async with installation() as gea, gea.client() as client:
        narrow(gea, at_once=2, max_waiting=10)
        gea.grace_s = 0.1
        await gea.start_all(FakeEngine(TEXT, pause=tap, max_sequences=2))
        asked = [ask(client, f"r-{number}") for number in range(10)]
        await holds(lambda: num_waiting(gea) >= 7)
        await gea.start(Pool.ROUTER, "router-2")
        await (gea.kill("router-1") if is_killed else gea.stop("router-1"))
        await holds(lambda: num_waiting(gea, "router-2") >= 7)
        tap.opened.set()
        assert await asyncio.gather(*asked) == [EndStatus.COMPLETED] * 10  # none is rejected the second time
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        assert {name: ends_in_order(gea).count(name) for name in set(forwarded(gea))} == {
            f"r-{number}": 1 for number in range(10)
        }


async def test_what_a_router_rejected_before_it_died_is_not_let_in_by_the_next() -> None:
    tap = Tap()
    async with installation() as gea, gea.client() as client:
        narrow(gea, at_once=1, max_waiting=3, tenant_share=1.0)
        await gea.start_all(FakeEngine(TEXT, pause=tap))
        asked = {f"r-{number}": ask(client, f"r-{number}") for number in range(40)}
        await holds(lambda: num_waiting(gea) == 3 and sum(task.done() for task in asked.values()) == 36)
        rejected = [name for name, task in asked.items() if task.done()]
        gea.broker.group(pool_group(Pool.ROUTER, "blue")).committed.clear()  # it died before it could commit
        await gea.kill("router-1")
        await gea.start(Pool.ROUTER, "router-2")
        await holds(lambda: all(ends_in_order(gea).count(name) == 2 for name in rejected))
        tap.opened.set()
        assert [await asked[name] for name in asked if name not in rejected] == [EndStatus.COMPLETED] * 4
        assert not set(forwarded(gea)) & set(rejected)


async def test_a_partition_that_is_lost_takes_its_waiting_requests_along() -> None:
    tap = Tap()
    async with installation() as gea, gea.client() as client:
        narrow(gea, at_once=1)
        await gea.start_all(FakeEngine(TEXT, pause=tap))
        asked = [ask(client, f"r-{number}") for number in range(12)]
        await holds(lambda: num_waiting(gea) >= 10)
        group = pool_group(Pool.ROUTER, "blue")
        gea.broker.group(group).generation += 1  # the group went through a generation without us
        await gea.broker.rebalance(group)
        await holds(lambda: num_waiting(gea) >= 10)
        assert num_waiting(gea) <= 12
        tap.opened.set()
        assert await asyncio.gather(*asked) == [EndStatus.COMPLETED] * 12


async def test_without_a_generation_worker_requests_go_on_to_wait_for_one() -> None:
    async with installation() as gea, gea.client() as client:
        narrow(gea, at_once=1)
        await gea.start(Pool.ROUTER, "router-1")
        asked = [ask(client, f"r-{number}") for number in range(5)]
        await gea.broker.until(lambda: len(forwarded(gea)) == 5)
        await gea.start(Pool.GENERATION, "generation-1", FakeEngine(TEXT))
        assert await asyncio.gather(*asked) == [EndStatus.COMPLETED] * 5


async def test_a_repeat_that_is_refused_does_not_end_a_request_that_waits_though_the_store_is_away() -> None:
    tap = Tap()
    async with installation() as gea, gea.client() as client:
        narrow(gea, at_once=1)
        await gea.start_all(FakeEngine(TEXT, pause=tap))
        gea.store.down = True
        asked = [ask(client, f"r-{number}") for number in range(3)]
        await holds(lambda: num_waiting(gea) >= 1)
        waiting = next(f"r-{number}" for number in range(3) if f"r-{number}" not in forwarded(gea))
        producer = await gea.broker.producer()
        refused = pack(GenerationRequest(prompt="tell me", max_tokens=10**6))
        await producer.send(REQUESTS, refused, key=waiting.encode(), headers=(("request_id", waiting.encode()),))
        await until(lambda: any(record.kind is Kind.SEE for record in gea.tokens_of(waiting)))
        tap.opened.set()
        assert await asyncio.gather(*asked) == [EndStatus.COMPLETED] * 3
