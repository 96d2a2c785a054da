"""Shares of lanes and tenants, in tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.request import Priority
from workers.router.fair_queue import QUANTUM_TOKENS, WEIGHTS, FairQueue

COSTS = st.integers(1, 8 * QUANTUM_TOKENS)


@dataclass(frozen=True, eq=False)
class Item:
    tenant: str
    tokens: int
    priority: Priority = Priority.NORMAL
    number: int = 0


def push(queue: FairQueue[Item], *items: Item) -> None:
    for item in items:
        queue.push(item, tenant=item.tenant, priority=item.priority, tokens=item.tokens)


def pop_all(queue: FairQueue[Item]) -> list[Item]:
    popped = []
    while (item := queue.pop()) is not None:
        popped.append(item)
    return popped


items = st.builds(Item, st.sampled_from("abc"), COSTS, st.sampled_from(list(Priority)))


@given(st.lists(items, max_size=40))
def test_everything_that_waits_comes_out_once_and_in_order_of_its_tenant_and_lane(waiting: list[Item]) -> None:
    queue: FairQueue[Item] = FairQueue()
    push(queue, *waiting)
    popped = pop_all(queue)
    assert len(queue) == queue.num_tenants == 0
    assert sorted(map(id, popped)) == sorted(map(id, waiting))
    for tenant in "abc":
        for priority in Priority:
            chosen = [item for item in waiting if (item.tenant, item.priority) == (tenant, priority)]
            assert [item for item in popped if (item.tenant, item.priority) == (tenant, priority)] == chosen


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), items, st.booleans()), max_size=60))
def test_it_gives_something_whenever_something_waits(steps: list[tuple[bool, Item, bool]]) -> None:
    queue: FairQueue[Item] = FairQueue()
    inside: list[Item] = []
    for is_push, item, is_removal in steps:
        if is_push and item not in inside:
            push(queue, item)
            inside.append(item)
        elif is_removal and inside:
            gone = inside.pop(len(inside) // 2)
            assert queue.remove(gone, tenant=gone.tenant, priority=gone.priority)
            assert not queue.remove(gone, tenant=gone.tenant, priority=gone.priority)
        else:
            popped = queue.pop()
            assert (popped is None) == (not inside)
            if popped is not None:
                inside.remove(popped)
        assert len(queue) == len(inside)
        assert {t: queue.num_of(t) for t in "abc"} == {t: sum(i.tenant == t for i in inside) for t in "abc"}


@given(st.lists(COSTS, min_size=30, max_size=60), st.lists(COSTS, min_size=30, max_size=60))
def test_tenants_that_always_wait_get_the_same_tokens_within_a_quantum(a: list[int], b: list[int]) -> None:
    queue: FairQueue[Item] = FairQueue()
    push(queue, *(Item("a", tokens) for tokens in a), *(Item("b", tokens) for tokens in b))
    served: Counter[str] = Counter()
    while queue.num_of("a") and queue.num_of("b"):
        item = queue.pop()
        assert item is not None
        served[item.tenant] += item.tokens
        assert abs(served["a"] - served["b"]) <= QUANTUM_TOKENS + max(a) + max(b)


def test_shares_are_in_tokens_and_not_in_requests() -> None:
    queue: FairQueue[Item] = FairQueue()
    push(queue, *(Item("long", 4_000) for _ in range(50)), *(Item("short", 100) for _ in range(2_000)))
    popped = [queue.pop() for _ in range(1_000)]
    tokens: Counter[str] = Counter()
    for item in popped:
        assert item is not None
        tokens[item.tenant] += item.tokens
    assert 0.85 < tokens["long"] / tokens["short"] < 1.15


def test_one_request_behind_a_flood_of_another_tenant_waits_for_a_turn_only() -> None:
    queue: FairQueue[Item] = FairQueue()
    push(queue, *(Item("flood", 500) for _ in range(100)))
    queue.pop()
    push(queue, Item("calm", 500))
    order = [item.tenant for item in pop_all(queue)]
    assert order.index("calm") <= 2 * QUANTUM_TOKENS // 500


def test_lanes_share_by_weight_and_none_starves() -> None:
    queue: FairQueue[Item] = FairQueue()
    for priority in Priority:
        push(queue, *(Item("a", 200, priority) for _ in range(1_000)))
    tokens: Counter[Priority] = Counter()
    for _ in range(1_300):
        item = queue.pop()
        assert item is not None
        tokens[item.priority] += item.tokens
    whole = sum(tokens.values())
    for priority, weight in WEIGHTS.items():
        assert abs(tokens[priority] / whole - weight / sum(WEIGHTS.values())) < 0.01


def test_a_lane_that_was_empty_has_saved_nothing_up() -> None:
    queue: FairQueue[Item] = FairQueue()
    push(queue, *(Item("a", 200, Priority.NORMAL) for _ in range(200)))
    for _ in range(100):
        queue.pop()
    push(queue, *(Item("b", 200, Priority.LOW) for _ in range(100)))
    order = [item.priority for item in pop_all(queue)][:20]
    assert order.count(Priority.LOW) <= 5


def test_a_request_of_many_quanta_goes_on_in_few_steps() -> None:
    queue: FairQueue[Item] = FairQueue()
    huge = Item("a", 10**12)
    push(queue, huge, Item("b", 10**12))
    assert queue.pop() is huge


def test_the_tenant_with_the_most_waiting_is_known_and_its_newest_least_urgent_first() -> None:
    queue: FairQueue[Item] = FairQueue()
    old, new, urgent = Item("a", 1), Item("a", 1), Item("a", 1, Priority.HIGH)
    push(queue, urgent, old, new, Item("b", 1))
    assert queue.largest_tenant() == "a"
    assert queue.items_of("a") == [new, old, urgent]
    assert queue.items_of("nobody") == []


def test_tokens_ahead_are_the_own_ones_and_fair_shares_of_the_others() -> None:
    queue: FairQueue[Item] = FairQueue()
    assert queue.tokens_ahead(tenant="a", priority=Priority.NORMAL) == 0
    push(queue, *(Item("flood", 1_000) for _ in range(100)))
    assert queue.tokens_ahead(tenant="a", priority=Priority.NORMAL) == 0
    assert queue.tokens_ahead(tenant="flood", priority=Priority.NORMAL) == 100_000
    push(queue, *(Item("a", 1_024) for _ in range(3)))
    assert queue.tokens_ahead(tenant="a", priority=Priority.NORMAL) == 3 * 1_024 + 2 * 1_024
