"""What Prometheus reads of an engine after real work."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from urllib.request import urlopen

import pytest

from streams.telemetry import Metrics, serve_metrics
from tests.flow.continued import ask as ask_gea
from tests.flow.continued import start_path
from tests.flow.harness import DIALOGUE, installation
from tests.workers.generation.engine.asking import GREEDY, NOWHERE, ask, read
from tests.workers.generation.fakes import ScriptedModel, scripted
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.settings import LocalEngineSettings
from workers.generation.engine_metrics import EngineMetrics

PROMPT = "The shop opens at nine, and closes at seven. " * 3
README = Path(__file__).parents[3] / "README.md"


EVERYWHERE = {"gea_consumer_lag", "gea_dead_letters_total"}


def documented() -> set[str]:
    """Return the names in the README's table of metrics."""
    _, _, section = README.read_text(encoding="utf-8").partition("\n### Metrics\n")
    table, _, _ = section.partition("\nEvery pool")
    return set(re.findall(r"`(gea_\w+)`", table)) - {"gea_"}


def scrape(metrics: Metrics) -> dict[str, float]:
    """Return the samples of a generation worker by name, as Prometheus gets them."""
    with (
        serve_metrics(metrics.registry, 0) as server,
        urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as response,
    ):
        text = response.read().decode()
    pattern = r'^(\w+)\{colour="blue",(?:finished_reason="\w+",)?pool="generation"\} (\S+)$'
    return {name: float(value) for name, value in re.findall(pattern, text, flags=re.MULTILINE)}


async def test_an_engine_that_has_worked_says_how_much_and_how_fast() -> None:
    metrics = Metrics(pool="generation", colour="blue")
    measured = EngineMetrics(metrics)
    engine = LocalEngine(
        NOWHERE,
        LocalEngineSettings(max_sequences=4, max_context=512),
        load_model=lambda folder, given: scripted(ScriptedModel("Hello, hello, hello, hello.")),
        on_step=measured.note_step,
    )
    await engine.start()
    measured.watch(engine.statistics)
    for place in range(3):  # one after the other: the second finds the first one's prompt
        _, finished = await read(engine.submit(ask(f"r{place}", PROMPT)))
        measured.note_finished(finished)
    found = await asyncio.to_thread(scrape, metrics)
    num_prompt, num_drawn = len(PROMPT), len("Hello, hello, hello, hello.") + 1
    assert found["gea_prefix_cache_queries_total"] == 3 * num_prompt
    assert 0 < found["gea_prefix_cache_hits_total"] < 2 * num_prompt
    assert found["gea_steps_total"] == found["gea_step_seconds_count"] == found["gea_iteration_tokens_total_count"]
    assert (
        found["gea_iteration_tokens_total_sum"]
        == 3 * (num_prompt + num_drawn - 1) - found["gea_prefix_cache_hits_total"]
    )
    assert found["gea_request_queue_time_seconds_count"] == 3
    assert 0 < found["gea_request_decode_time_seconds_sum"] < 30
    assert found["gea_request_generation_tokens_sum"] == 3 * num_drawn
    assert 0.3 < found["gea_request_repetition_ratio_sum"] / 3 < 1  # "hello, " comes again and again
    assert found["gea_active_blocks"] == found["gea_kv_cache_usage_perc"] == found["gea_tokens_in_flight"] == 0
    assert 0 < found["gea_cached_blocks"] <= found["gea_total_blocks"]
    await engine.stop()


async def test_what_runs_is_seen_while_it_runs() -> None:
    metrics = Metrics(pool="generation", colour="blue")
    engine = LocalEngine(
        NOWHERE,
        LocalEngineSettings(max_sequences=4, max_context=512),
        load_model=lambda folder, given: scripted(ScriptedModel("x" * 400)),
    )
    await engine.start()
    EngineMetrics(metrics).watch(engine.statistics)
    stream = engine.submit(ask("r", "p" * 20, GREEDY))
    for _ in range(30):
        await anext(stream)
    found = scrape(metrics)  # on this thread: the engine goes on beside it
    assert found["gea_active_blocks"] >= 4
    assert found["gea_kv_cache_usage_perc"] == pytest.approx(found["gea_active_blocks"] / found["gea_total_blocks"])
    assert 0 <= found["gea_fragmentation"] < 0.3
    assert found["gea_batch_size"] == 1 and found["gea_tokens_per_s"] > 0
    engine.abort("r")
    await engine.stop()


async def test_a_worker_shows_every_documented_name_and_no_other() -> None:
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine("Hello."))
        await ask_gea(client, **DIALOGUE)
        gea.workers["generation-1"].worker.status()
        await gea.stop("generation-1")  # its last request has been counted then
        found = await asyncio.to_thread(scrape, gea.metrics["generation-1"])
    shown = {name.removesuffix("_count") for name in found} | set(found)
    assert documented() - shown == set()
    assert {name for name in shown if not re.search("_(bucket|sum|count|created)$", name)} - documented() <= EVERYWHERE
    assert found["gea_request_queue_time_seconds_count"] == found["gea_request_prompt_tokens_count"] == 1
    assert found["gea_generation_tokens_total"] == len("Hello.") + 1
