"""What the router does about faults of its own, and about ids that it knows."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.errors import RequestFailedError
from schemas.tokens import Kind
from schemas.worker import Pool
from streams.topics import REQUESTS
from tests.flow.harness import DIALOGUE, installation
from tests.flow.records import all_committed, dead_letters
from workers.router.stage import RouterHandler


class BrokenPlacement:
    """Fails by a fault of ours."""

    def partition(self, topic: str, routed: Any) -> int | None:
        raise ZeroDivisionError("a fault of ours")


@pytest.mark.parametrize("is_store_down", [False, True])
async def test_a_request_that_could_not_be_routed_ends_and_is_not_pointed_to_itself(is_store_down: bool) -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start(Pool.ROUTER, "router-1")
        handler = gea.workers["router-1"].handler
        assert isinstance(handler, RouterHandler)
        handler._outbox.placement = BrokenPlacement()
        gea.store.down = is_store_down
        with pytest.raises(RequestFailedError) as caught:
            await client.complete("tell me", request_id="r-1", timeout_s=5, **DIALOGUE)
        assert caught.value.failure_code == "internal"
        assert [record.kind for record in gea.tokens_of("r-1")] == [Kind.END]
        assert [letter.code for letter in dead_letters(gea)] == ["internal"]
        await all_committed(gea, REQUESTS, Pool.ROUTER)
