"""An entrant's process: one answer for each command, errors told, and nothing left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from ops.bench.engine.entrant import MIN_TOKENS, Turn, forget_peak, peak_bytes
from ops.bench.engine.options import EngineName
from ops.bench.engine.process import Starter, environment, running, starter
from ops.errors import CommandError

SCRIPTED = Starter(python=Path(sys.executable), module="tests.ops.bench.engine.scripted_entrant")
LOAD = {"do": "load", "precision": "fp32"}


async def test_answers_hold_arrivals_times_and_memory() -> None:
    async with running("scripted", SCRIPTED, 1) as process:
        loaded = await process.ask(**LOAD)
        assert 0 < loaded["imports_bytes"] <= loaded["load_peak_bytes"]
        answer = await process.ask(do="run", prompts=[[5], [8]], max_tokens=3, limit_s=60)
    assert [[tokens for _, tokens in each] for each in answer["arrivals"]] == [[[6], [7], [8]], [[9], [10], [11]]]
    times = [at for at, _ in answer["arrivals"][0]]
    assert times == sorted(times)
    assert times[0] >= 0
    assert answer["peak_bytes"] > 1_000_000
    assert (answer["version"], answer["weight_bytes"]) == ("scripted", 3_000_000)


async def test_a_run_is_broken_off_when_its_time_is_over() -> None:
    async with running("scripted", SCRIPTED, 1) as process:
        await process.ask(**LOAD)
        answer = await process.ask(do="run", prompts=[[5]], max_tokens=1_000, limit_s=0)
    assert len(answer["arrivals"][0]) == MIN_TOKENS


async def test_an_error_is_told_and_the_process_goes_on() -> None:
    async with running("scripted", SCRIPTED, 1) as process:
        with pytest.raises(CommandError, match="scripted: ValueError: no such precision") as failed:
            await process.ask(do="load", precision="broken")
        assert any("ValueError" in line for line in failed.value.details)
        assert (await process.ask(**LOAD))["version"] == "scripted"


async def test_a_process_that_ends_is_told_with_the_end_of_its_log() -> None:
    async with running("scripted", SCRIPTED, 1) as process:
        await process.ask(**LOAD)
        with pytest.raises(CommandError, match="ended before its answer") as failed:
            await process.ask(do="run", prompts=[[13]], max_tokens=1, limit_s=1)
        assert failed.value.details == ("what a library says",)


async def test_no_process_is_left_behind() -> None:
    before = {child.pid for child in psutil.Process().children()}
    async with running("scripted", SCRIPTED, 1) as process:
        await process.ask(**LOAD)
        assert {child.pid for child in psutil.Process().children()} - before
    assert {child.pid for child in psutil.Process().children()} <= before


def test_everybody_gets_as_many_threads_and_none_of_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEA_GENERATION_ENGINE", "fake")
    found = environment(3)
    assert found["OMP_NUM_THREADS"] == "3"
    assert not [name for name in found if name.startswith("GEA_")]


def test_llama_cpp_alone_runs_in_the_peers_python() -> None:
    pythons = {engine: starter(engine, Path("peers")).python for engine in EngineName}
    assert pythons.pop(EngineName.LLAMA_CPP) == Path("peers")
    assert set(pythons.values()) == {Path(sys.executable)}


def test_a_turn_is_over_only_when_each_request_tells_its_pace() -> None:
    turn = Turn(0.0)
    turn.began_s -= 1
    assert not turn.is_over(MIN_TOKENS - 1)
    assert turn.is_over(MIN_TOKENS)
    assert not Turn(1e6).is_over(MIN_TOKENS)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can begin its high-water mark anew")
def test_the_high_water_mark_begins_anew() -> None:
    taken = bytearray(200 << 20)
    taken[::4096] = b"x" * len(taken[::4096])
    peak = peak_bytes()
    del taken
    forget_peak()
    assert peak_bytes() < peak - (100 << 20)
