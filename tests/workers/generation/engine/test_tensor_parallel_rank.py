"""Ranks of one model, here in threads of one process: what they compute together, and what becomes of a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from schemas.errors import ConfigError, EngineUnavailableError
from tests.workers.generation.engine.greedy import run_greedy
from tests.workers.generation.engine.rank_plans import make_plan
from tests.workers.generation.engine.test_model import make_model, make_runner, one_thread, save
from workers.generation.engine.batch import ModelRunner, Segment, StepBatch
from workers.generation.engine.protocol import Precision
from workers.generation.engine.tensor_parallel_rank import Rank, RankPlan

__all__ = ["one_thread"]

PROMPTS = ((5,), (7, 8, 9, 10), tuple(range(20, 57)), (3, 3, 3, 4, 4, 5, 6, 7, 8))
NUM_TOKENS = 20
BATCH = StepBatch(segments=(Segment(token_ids=(5, 6, 7), start=0, block_table=(4,), num_logits=2),))


class ThreadedRanks:
    """Ranks in threads, with the face of a runner."""

    def __init__(self, plan: RankPlan, meeting: Path, threads: ThreadPoolExecutor) -> None:
        self._threads, self.vocab_size = threads, plan.open_source().config.vocab_size
        self.layout = plan.shape.layout("threads")
        self.ranks = self.together([partial(Rank, plan, meeting, rank) for rank in range(plan.size)])

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run at the same time, and return the results, or raise the first error when all have ended."""
        futures = [self._threads.submit(call) for call in calls]
        errors = [future.exception(timeout=60) for future in futures]
        for error in filter(None, errors):
            raise error
        return [future.result() for future in futures]

    def forward(self, batch: StepBatch) -> torch.Tensor:
        found = self.together([partial(rank.forward, batch) for rank in self.ranks])
        return cast(torch.Tensor, found[0])[:, : self.vocab_size]


@contextmanager
def threaded(plan: RankPlan, folder: Path) -> Iterator[ThreadedRanks]:
    with ThreadPoolExecutor(plan.size) as threads:
        yield ThreadedRanks(plan, folder / "meeting", threads)


class OutOfMemory:
    """A runner that fails in the middle of a step: after its first sum over ranks."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._rank.reduce(torch.zeros((batch.num_tokens, 48)))
        raise MemoryError("no memory")


@pytest.mark.parametrize(
    ("family", "settings", "size"),
    [
        ("llama", {"tie_word_embeddings": True}, 2),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "vocab_size": 131}, 4),
        ("qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5}, 2),
    ],
)
def test_ranks_draw_the_tokens_of_one(tmp_path: Path, family: str, settings: dict[str, Any], size: int) -> None:
    save(tmp_path, make_model(family, **settings))
    plain = run_greedy(make_runner(tmp_path), PROMPTS, NUM_TOKENS)
    with threaded(make_plan(tmp_path, size=size), tmp_path) as ranks:
        assert run_greedy(cast(ModelRunner, ranks), PROMPTS, NUM_TOKENS, guides=plain) == plain


def test_logits_of_ranks_are_those_of_one(tmp_path: Path) -> None:
    save(tmp_path, make_model("llama"))
    plain = make_runner(tmp_path).forward(BATCH)  # (2, vocab)
    with threaded(make_plan(tmp_path), tmp_path) as ranks:
        torch.testing.assert_close(ranks.forward(BATCH), plain, rtol=1e-4, atol=1e-4)


def test_8_bit_weights_are_split_too(tmp_path: Path) -> None:
    """Shares of 64 inputs keep the groups of the whole, so that it is the same model."""
    save(tmp_path, make_model("llama", hidden_size=128, intermediate_size=128))
    plain = make_runner(tmp_path, Precision.INT8).forward(BATCH)
    with threaded(make_plan(tmp_path, precision=Precision.INT8), tmp_path) as ranks:
        torch.testing.assert_close(ranks.forward(BATCH), plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_amid_a_step_costs_the_step_and_not_the_group(tmp_path: Path, failing: int) -> None:
    save(tmp_path, make_model("llama"))
    with threaded(make_plan(tmp_path), tmp_path) as ranks:
        plain = ranks.forward(BATCH)
        rank = ranks.ranks[failing]
        whole = rank.runner
        rank.runner = OutOfMemory(rank)
        with pytest.raises(MemoryError, match="no memory"):
            ranks.forward(BATCH)
        rank.runner = whole
        assert torch.equal(ranks.forward(BATCH), plain)


def test_a_rank_without_the_others_gives_up_in_bounded_time(tmp_path: Path) -> None:
    save(tmp_path, make_model("llama"))
    with threaded(make_plan(tmp_path, timeout_s=1.0), tmp_path) as ranks, pytest.raises(EngineUnavailableError):
        ranks.ranks[0].forward(BATCH)


def test_ranks_that_do_not_come_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    save(tmp_path, make_model("llama"))
    with pytest.raises(EngineUnavailableError):
        Rank(make_plan(tmp_path, start_s=0.5), tmp_path / "meeting", 0)


def test_a_model_whose_heads_cannot_be_split_is_refused(tmp_path: Path) -> None:
    save(tmp_path, make_model("llama", num_key_value_heads=1))
    with pytest.raises(ConfigError, match="num_kv_heads 1"):
        Rank(make_plan(tmp_path, size=2), tmp_path / "meeting", 0)
