"""A cell of the comparison: everybody runs the same prompts in turns, and each gets a result or a reason."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ops.bench.engine import race
from ops.bench.engine.options import EngineName, EngineOptions, Profile, Workload
from ops.bench.engine.process import Starter
from ops.bench.engine.prompts import PromptMaker
from ops.bench.engine.race import Cell, Contest, run_cell
from ops.bench.engine.run import run_engine
from ops.errors import CommandError
from tests.workers.generation.engine.test_model import save_tiny_model
from tests.workers.generation.fakes import save_tokenizer
from workers.generation.engine.protocol import Precision
from workers.generation.engine.tokenizer import BytePairTokenizer

WHO = [(EngineName.GEA, "int8"), (EngineName.GENERATE, "fp32"), (EngineName.LLAMA_CPP, "q4_1")]
SMALL = Profile(name="short", prompt_tokens=12, max_tokens=10)
KEYS = {"tokens_per_s", "ttft_ms", "itl_ms", "peak_memory_mb"}


@pytest.fixture
def contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contest:
    """Everybody is played by an entrant that counts."""
    scripted = Starter(python=Path(sys.executable), module="tests.ops.bench.engine.scripted_entrant")
    monkeypatch.setattr(race, "starter", lambda engine, python: scripted)
    monkeypatch.setattr(race, "REST_S", 0.0)
    save_tokenizer(tmp_path)
    return contest_in(tmp_path)


def contest_in(folder: Path, **given: Any) -> Contest:
    options: dict[str, Any] = {"repeats": 3, "limit_s": 60.0, "say": lambda text: None, **given}
    prompts = PromptMaker.load(BytePairTokenizer.load(folder), folder)
    return Contest(folder=folder, ggufs={}, prompts=prompts, peers_python=None, threads=1, **options)


async def test_each_entrant_has_a_result_with_the_fields_of_the_contract(contest: Contest) -> None:
    found = await run_cell(contest, Cell(workload=Workload.PLAIN, profile=SMALL, concurrency=2), WHO)
    assert [(each["engine"], each["precision"]) for each in found] == [(str(name), kind) for name, kind in WHO]
    for each in found:
        assert (each["workload"], each["profile"], each["concurrency"]) == ("plain", "short", 2)
        assert each.keys() >= KEYS
        assert set(each["ttft_ms"]) == set(each["itl_ms"]) == {"p50", "p99"}
        assert each["num_runs"] == 3
        assert each["num_measured_tokens"] == 3 * 2 * SMALL.max_tokens
        assert each["share_equal_to_transformers"] == 1.0
        assert each["memory_parts_mb"]["weights"] == 3.0


async def test_who_has_spent_its_limit_runs_no_further_repeat(
    contest: Contest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "PREFILL_LIMITS", 1e12)
    cell = Cell(workload=Workload.PLAIN, profile=SMALL, concurrency=1)
    (found,) = await run_cell(contest_in(tmp_path, limit_s=1e-9), cell, WHO[1:2])
    assert (found["num_runs"], found["is_reckoned"]) == (1, True)


async def test_prompts_that_take_too_long_are_refused_with_the_reason(
    contest: Contest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "PREFILL_LIMITS", 0)
    (found,) = await run_cell(contest, Cell(workload=Workload.PLAIN, profile=SMALL, concurrency=1), WHO[:1])
    assert "--limit" in found["skipped"]
    assert KEYS.isdisjoint(found)


async def test_an_entrant_that_cannot_load_ends_the_bench_by_name(contest: Contest) -> None:
    with pytest.raises(CommandError, match="gea broken: ValueError"):
        await run_cell(
            contest, Cell(workload=Workload.PLAIN, profile=SMALL, concurrency=1), [(EngineName.GEA, "broken")]
        )


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_a_tiny_model_runs_everywhere_and_says_the_same(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_tokenizer(model)
    save_tiny_model(model)
    options = EngineOptions(
        engines=(EngineName.GEA, EngineName.GENERATE_BATCH, EngineName.GENERATE),
        precisions=(Precision.FP32,),
        workloads=(Workload.PLAIN,),
        profiles=(SMALL,),
        concurrency=(3,),
        repeats=2,
        limit_s=60.0,
        threads=1,
        has_extras=False,
    )
    found = await run_engine(options, model, lambda text: None)
    assert [each["engine"] for each in found["results"]] == [str(each) for each in options.engines]
    for each in found["results"]:
        assert each["num_measured_tokens"] == 2 * 3 * SMALL.max_tokens, "an end of sequence has ended an answer"
        assert each["share_equal_to_transformers"] == 1.0
        assert each["peak_memory_mb"] > each["memory_parts_mb"]["imports"] > 50
    assert {each["against"] for each in found["ratios"]} == {"transformers_generate", "transformers_generate_batch"}
