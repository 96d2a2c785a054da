"""Where blocks run out, the least urgent makes room and goes on later with the same tokens; somebody always runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.workers.generation.engine.readers import GREEDY, Reader, answer, request, run
from tests.workers.generation.fakes import ContextModel, PagedModel, scripted_core
from workers.generation.engine.core import EngineCore
from workers.generation.engine.protocol import EngineRequest, Finished
from workers.generation.engine.settings import Preemption

LONG = replace(GREEDY, max_tokens=24, logit_bias={256: -50.0})
WARM = replace(LONG, temperature=1.0, seed=4)


def asked(count: int, n: int = 1) -> list[EngineRequest]:
    return [request(str(place), f"prompt {place}", replace(WARM, n=n, seed=place)) for place in range(count)]


def tight(preemption: Preemption, *, num_blocks: int, **limits: object) -> tuple[PagedModel, EngineCore]:
    model = ContextModel(num_blocks=num_blocks, block_size=4)
    return model, scripted_core(model, preemption=preemption, **{"swap_blocks": 100, **limits})  # type: ignore[arg-type]


def all_together(core: EngineCore, requests: list[EngineRequest]) -> list[Reader]:
    readers = [Reader() for _ in requests]
    for each, reader in zip(requests, readers, strict=True):
        core.add(each, reader.events.append)
    run(core, max_steps=5_000)
    return readers


def alone(each: EngineRequest) -> list[tuple[int, ...]]:
    reader = answer(scripted_core(ContextModel()), each)
    return [reader.token_ids(index) for index in range(each.sampling.n)]


@pytest.mark.parametrize("preemption", Preemption)
@pytest.mark.parametrize(("num_blocks", "n"), [(8, 1), (9, 1), (12, 1), (20, 1), (8, 3), (11, 3)])
def test_a_pool_that_holds_barely_one_answers_everybody_with_the_same_tokens(
    preemption: Preemption, num_blocks: int, n: int
) -> None:
    _, core = tight(preemption, num_blocks=num_blocks)
    requests = asked(3, n)
    for each, reader in zip(requests, all_together(core, requests), strict=True):
        assert [reader.token_ids(index) for index in range(n)] == alone(each)
        assert reader.finished.usage.completion_tokens == reader.num_tokens() == 24 * n
    if n == 3 or num_blocks == 12:
        assert core.statistics().num_preemptions > 0


def test_what_was_moved_to_host_memory_is_not_read_again() -> None:
    counts = {}
    for preemption in Preemption:
        model, core = tight(preemption, num_blocks=14, has_prefix_cache=False)
        all_together(core, asked(3))
        statistics = core.statistics()
        assert statistics.num_preemptions > 0
        counts[preemption] = sum(tokens for batch in model.batches for _, tokens, _ in batch)
        assert statistics.swap_ops == (2 * statistics.num_preemptions if preemption is Preemption.SWAP else 0)
    assert counts[Preemption.SWAP] == 3 * (8 + 23) < counts[Preemption.RECOMPUTE]


def test_host_memory_is_bounded_and_what_does_not_fit_there_is_read_again() -> None:
    _, core = tight(Preemption.SWAP, num_blocks=9, swap_blocks=3)
    requests = asked(4)
    readers = all_together(core, requests)
    assert [[reader.token_ids()] for reader in readers] == [alone(each) for each in requests]
    assert core.statistics().swap_ops < 2 * core.statistics().num_preemptions
    assert core.scheduler._num_host_blocks == 0


def test_host_memory_of_an_aborted_request_is_free_again() -> None:
    _, core = tight(Preemption.SWAP, num_blocks=10)
    active = [core.add(each, lambda event: None) for each in asked(3)]
    while not core.scheduler._num_host_blocks:
        core.step()
    for each in active:
        assert each is not None
        core.abort(each)
    assert core.scheduler._num_host_blocks == 0
    run(core)


@pytest.mark.parametrize("broken", ["read_blocks", "write_blocks"])
def test_blocks_that_cannot_be_moved_cost_one_request_at_most(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, core = tight(Preemption.SWAP, num_blocks=12)

    def fail(*_: object) -> object:
        monkeypatch.undo()
        raise MemoryError("no host memory")

    monkeypatch.setattr(model, broken, fail)
    requests = asked(3)
    readers = all_together(core, requests)
    whole = [[reader.token_ids()] == alone(each) for each, reader in zip(requests, readers, strict=True)]
    assert whole.count(False) == (broken == "write_blocks")


def test_the_least_urgent_makes_room_first_and_of_equal_ones_the_latest() -> None:
    _, core = tight(Preemption.RECOMPUTE, num_blocks=16)
    ends: list[int] = []
    for place, (each, priority) in enumerate(zip(asked(4), (1, 0, 1, 0), strict=True)):
        sampling = replace(each.sampling, max_tokens=40)
        core.add(
            replace(each, priority=priority, sampling=sampling),
            lambda event, place=place: ends.append(place) if isinstance(event, Finished) else None,  # type: ignore[misc]
        )
    run(core)
    assert core.statistics().num_preemptions > 0
    assert ends == [1, 3, 0, 2]


def test_prompts_that_are_read_at_once_take_turns_where_both_do_not_fit() -> None:
    for preemption, chunk, budget in product(Preemption, (4, 16), (4, 64)):
        model = ContextModel(num_blocks=12, block_size=4)
        core = scripted_core(
            model, preemption=preemption, swap_blocks=100, prefill_chunk=chunk, max_batched_tokens=budget
        )
        requests = [
            request(str(place), f"{place}" * 40, replace(WARM, max_tokens=8, n=1 + place % 2)) for place in range(3)
        ]
        for each, reader in zip(requests, all_together(core, requests), strict=True):
            assert [reader.token_ids(index) for index in range(each.sampling.n)] == alone(each)


def test_an_urgent_request_overtakes_those_that_wait_but_takes_nobody_s_blocks() -> None:
    _, core = tight(Preemption.RECOMPUTE, num_blocks=8)
    order: list[str] = []
    for name, priority in (("runs", 5), ("waits", 5), ("urgent", 0)):
        core.add(
            replace(request(name, f"{name:16}", replace(LONG, max_tokens=12)), priority=priority),
            lambda event, name=name: order.append(name),  # type: ignore[misc]
        )
        core.step()
    run(core)
    assert list(dict.fromkeys(order)) == ["runs", "urgent", "waits"]
