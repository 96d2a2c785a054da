"""One model over two processes: the tokens of one, blocks like those of one, and an end whatever happens."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from schemas.errors import ConfigError, EngineUnavailableError
from tests.workers.generation.engine.greedy import run_greedy
from tests.workers.generation.engine.rank_plans import make_plan
from tests.workers.generation.engine.test_model import make_model, make_runner, save
from workers.generation.engine.batch import ModelRunner, Segment, StepBatch
from workers.generation.engine.tensor_parallel import TensorParallelRunner

pytestmark = pytest.mark.slow  # each rank is a process that imports torch
ROOT = Path(__file__).resolve().parents[4]
PROMPTS = ((5,), (7, 8, 9, 10), tuple(range(20, 57)), (3, 3, 3, 4, 4, 5, 6, 7, 8))
NUM_TOKENS = 20
END_S = 20.0  # far more than the end of a process takes, far less than any time limit of the ranks
CHUNK = Segment(token_ids=(5, 6, 7), start=0, block_table=(3,), num_logits=1)


def start(folder: Path, *, timeout_s: float = 60.0) -> TensorParallelRunner:
    return TensorParallelRunner(make_plan(folder, timeout_s=timeout_s), vocab_size=128, identity="tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path, make_model("llama"))
    return path


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[TensorParallelRunner]:
    """Two ranks for the tests that leave them alive."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    runner = start(folder)
    yield runner
    runner.close()
    torch.set_num_threads(before)


def test_two_processes_draw_the_tokens_of_one(folder: Path, shared: TensorParallelRunner) -> None:
    plain = run_greedy(make_runner(folder), PROMPTS, NUM_TOKENS)
    assert run_greedy(shared, PROMPTS, NUM_TOKENS) == plain
    shared.cache.clear_blocks(range(shared.layout.num_blocks))
    assert run_greedy(shared, PROMPTS, NUM_TOKENS, guides=plain) == plain


def test_blocks_are_those_of_a_cache_with_all_heads(folder: Path, shared: TensorParallelRunner) -> None:
    alone = make_runner(folder)
    logits = []
    for runner in (alone, shared):
        runner.forward(StepBatch(segments=(CHUNK,)))
        runner.cache.copy_block(3, 5)
        content = read(runner, 5)
        runner.cache.clear_blocks((3, 5))
        runner.cache.write_blocks((1,), content)
        assert all(map(torch.equal, content, read(runner, 1)))
        logits.append(runner.forward(StepBatch(segments=(Segment(token_ids=(8,), start=3, block_table=(1,)),))))
    torch.testing.assert_close(read(alone, 1), read(shared, 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert not any(tensor.any() for tensor in read(shared, 3, 5))


def test_a_step_that_fails_leaves_the_ranks_in_step(shared: TensorParallelRunner) -> None:
    batch = StepBatch(segments=(CHUNK,))
    before = shared.forward(batch)
    unknown = Segment(token_ids=(128,), start=0, block_table=(6,))
    with pytest.raises(IndexError):
        shared.forward(StepBatch(segments=(unknown,)))
    assert torch.equal(shared.forward(batch), before)


def test_the_split_is_part_of_the_caches_identity(folder: Path, shared: TensorParallelRunner) -> None:
    assert shared.layout.identity != make_runner(folder).layout.identity
    assert shared.layout.bytes_per_block == make_runner(folder).layout.bytes_per_block


@pytest.mark.parametrize(
    ("number", "timeout_s", "reason"),
    [(signal.SIGKILL, 60.0, "rank 1 of 2 has ended with exit code -9"), (signal.SIGSTOP, 1.0, "has not answered")],
    ids=["killed", "hung"],
)
def test_a_rank_that_is_gone_ends_every_step_in_bounded_time(
    folder: Path, number: signal.Signals, timeout_s: float, reason: str
) -> None:
    runner = start(folder, timeout_s=timeout_s)
    (pid,) = runner.pids
    assert pid is not None
    batch = StepBatch(segments=(CHUNK,))
    runner.forward(batch)
    os.kill(pid, number)
    started_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(EngineUnavailableError, match=reason):
            runner.forward(batch)
    with pytest.raises(EngineUnavailableError, match=reason):
        runner.cache.clear_blocks((1,))
    runner.close()
    assert time.monotonic() - started_s < END_S
    assert not is_alive(pid)


def test_close_ends_the_processes_and_may_be_repeated(folder: Path) -> None:
    runner = start(folder)
    (pid,) = runner.pids
    assert pid is not None
    runner.close()
    runner.close()
    assert not is_alive(pid)
    with pytest.raises(EngineUnavailableError):
        runner.forward(StepBatch(segments=(CHUNK,)))


def test_a_model_that_cannot_be_split_is_refused_and_leaves_no_process(tmp_path: Path) -> None:
    save(tmp_path, make_model("llama", num_key_value_heads=1))
    with pytest.raises(ConfigError, match="2 does not divide this model's num_kv_heads 1"):
        start(tmp_path)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "left"])
def test_ranks_end_with_their_parent(folder: Path, *, is_killed: bool) -> None:
    command = [sys.executable, "-m", "tests.workers.generation.engine.rank_parent", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        rank = os.pidfd_open(int(parent.stdout.readline()))
        if is_killed:
            parent.kill()
        else:
            parent.stdin.close()
        ended, _, _ = select.select([rank], [], [], END_S)
        os.close(rank)
        assert ended, "the rank has outlived its parent"
        assert parent.wait(END_S) == (-signal.SIGKILL if is_killed else 0)


def read(runner: ModelRunner, *blocks: int) -> Sequence[torch.Tensor]:
    return cast(Sequence[torch.Tensor], runner.cache.read_blocks(blocks))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
