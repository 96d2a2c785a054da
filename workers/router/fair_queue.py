"""Who goes on next: lanes share by weight, tenants in a lane by deficit round robin, both counted in tokens. Pure.

Deficit round robin after Shreedhar and Varghese (1996): a tenant whose turn it is gets a quantum of tokens and goes on
while it can pay. The invariants: something comes out whenever something is in; two tenants that always have something
waiting in a lane get the same tokens but for a quantum and their two largest requests; a lane that always has something
waiting gets at least its weight's share of the tokens. Order is kept within a tenant's lane.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from schemas.request import Priority

T = TypeVar("T")
QUANTUM_TOKENS = 1_024  # about one request: a smaller one costs rounds, a larger one makes turns coarse
WEIGHTS = {Priority.HIGH: 8, Priority.NORMAL: 4, Priority.LOW: 1}


@dataclass(slots=True)
class _Waiting(Generic[T]):
    """What one tenant has waiting in one lane, oldest first, each with its tokens."""

    items: deque[tuple[T, int]] = field(default_factory=deque)
    tokens: int = 0
    deficit: int = 0


class _Lane(Generic[T]):
    """Tenants by deficit round robin; the one whose turn it is stands first."""

    def __init__(self) -> None:
        self.tenants: OrderedDict[str, _Waiting[T]] = OrderedDict()
        self.passed = 0.0
        """Tokens that went by, over the weight: the lane with the least is next."""
        self._is_turn_new = True

    def push(self, item: T, tenant: str, tokens: int) -> None:
        waiting = self.tenants.setdefault(tenant, _Waiting())
        waiting.items.append((item, tokens))
        waiting.tokens += tokens

    def pop(self) -> tuple[T, str, int]:
        """Take the next one out. The lane must not be empty."""
        self._skip_rounds()
        while True:
            tenant, waiting = next(iter(self.tenants.items()))
            if self._is_turn_new:
                waiting.deficit += QUANTUM_TOKENS
                self._is_turn_new = False
            item, tokens = waiting.items[0]
            if tokens <= waiting.deficit:
                waiting.deficit -= tokens
                self.remove(item, tenant)
                return item, tenant, tokens
            self._end_turn()

    def remove(self, item: T, tenant: str) -> bool:
        """Take one out, wherever it stands; False if it is not there."""
        waiting = self.tenants.get(tenant)
        found = next((entry for entry in waiting.items if entry[0] is item), None) if waiting is not None else None
        if waiting is None or found is None:
            return False
        if waiting.items[0] is found:
            waiting.items.popleft()
        else:
            waiting.items.remove(found)
        waiting.tokens -= found[1]
        if not waiting.items:  # who has nothing waiting saves nothing
            self._is_turn_new = self._is_turn_new or next(iter(self.tenants)) == tenant
            del self.tenants[tenant]
        return True

    def _end_turn(self) -> None:
        self.tenants.move_to_end(next(iter(self.tenants)))
        self._is_turn_new = True

    def _skip_rounds(self) -> None:
        """Give everybody the quanta of the rounds in which nobody could pay, at once: large requests cost no time."""
        short = (waiting.items[0][1] - waiting.deficit for waiting in self.tenants.values())
        num_rounds = min(math.ceil(tokens / QUANTUM_TOKENS) for tokens in short) - 1
        if num_rounds > 0:
            for waiting in self.tenants.values():
                waiting.deficit += num_rounds * QUANTUM_TOKENS


class FairQueue(Generic[T]):
    """What waits, by priority and tenant. Items are told apart by identity."""

    def __init__(self) -> None:
        self._lanes: dict[Priority, _Lane[T]] = {priority: _Lane() for priority in Priority}
        self._num_by_tenant: dict[str, int] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def tokens(self) -> int:
        """Return the tokens of all that waits."""
        return sum(waiting.tokens for lane in self._busy() for waiting in lane.tenants.values())

    @property
    def num_tenants(self) -> int:
        """Return how many tenants have something waiting."""
        return len(self._num_by_tenant)

    def num_of(self, tenant: str) -> int:
        """Return how many a tenant has waiting, in all lanes."""
        return self._num_by_tenant.get(tenant, 0)

    def largest_tenant(self) -> str | None:
        """Return the tenant with the most waiting, None if nothing waits."""
        return max(self._num_by_tenant, key=lambda tenant: self._num_by_tenant[tenant], default=None)

    def items_of(self, tenant: str) -> list[T]:
        """Return what a tenant has waiting: the least urgent and newest first."""
        lanes = (self._lanes[priority] for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH))
        return [item for lane in lanes if tenant in lane.tenants for item, _ in reversed(lane.tenants[tenant].items)]

    def push(self, item: T, *, tenant: str, priority: Priority, tokens: int) -> None:
        """Let an item wait. A lane in which nothing waited has saved nothing up."""
        lane = self._lanes[priority]
        if not lane.tenants:
            lane.passed = max(lane.passed, min((each.passed for each in self._busy()), default=lane.passed))
        lane.push(item, tenant, tokens)
        self._num_by_tenant[tenant] = self.num_of(tenant) + 1
        self._num_waiting += 1

    def pop(self) -> T | None:
        """Take out who goes on next, None if nothing waits."""
        busy = [(self._lanes[priority], priority) for priority in Priority if self._lanes[priority].tenants]
        if not busy:
            return None
        lane, priority = min(busy, key=lambda entry: entry[0].passed)
        item, tenant, tokens = lane.pop()
        lane.passed += tokens / WEIGHTS[priority]
        self._forget(tenant)
        return item

    def remove(self, item: T, *, tenant: str, priority: Priority) -> bool:
        """Take out an item that waits no more; False if it was not there."""
        is_found = self._lanes[priority].remove(item, tenant)
        if is_found:
            self._forget(tenant)
        return is_found

    def tokens_ahead(self, *, tenant: str, priority: Priority) -> int:
        """Return the tokens that surely go on before a new item of a tenant: its own in its lane, and as much of each
        other tenant there, by fair shares. What the other lanes take comes on top."""
        lane = self._lanes[priority]
        own = lane.tenants[tenant].tokens if tenant in lane.tenants else 0
        others = (waiting.tokens for name, waiting in lane.tenants.items() if name != tenant)
        return own + sum(min(tokens, max(0, own - QUANTUM_TOKENS)) for tokens in others)

    def _busy(self) -> list[_Lane[T]]:
        return [lane for lane in self._lanes.values() if lane.tenants]

    def _forget(self, tenant: str) -> None:
        self._num_waiting -= 1
        self._num_by_tenant[tenant] -= 1
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]
