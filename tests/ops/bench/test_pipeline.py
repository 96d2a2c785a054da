"""The pipeline bench: what it makes of its figures, its items, and what it says where its peers are missing."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ops.bench.pipeline import PipelineOptions, conditions, find_peers, idle_figures, percentiles
from ops.bench.pipeline_path import Load, Passage, hops
from ops.bench.pipeline_race import (
    MODES,
    NUM_WARM_UP,
    WORKS,
    RaceOptions,
    Run,
    Work,
    command,
    fill,
    item,
    summary,
    turned,
)
from ops.bench.pipeline_report import tables
from ops.errors import CommandError
from streams.broker import TopicPartition, TopicSpec
from streams.memory import MemoryBroker

WORK = Work(work_ms=10, num_items=NUM_WARM_UP + 50)


def ran(entrant: str, *rates: float, work_ms: int = 10) -> list[Run]:
    return [Run(entrant=entrant, work_ms=work_ms, items_per_s=rate, cpu_share=0.5) for rate in rates]


def test_ratio_is_that_of_the_medians_to_the_best_peer_and_its_spread_goes_repeat_by_repeat() -> None:
    runs = [*ran("gea", 100, 120, 80), *ran("quix", 40, 50, 60), *ran("faststream", 10, 10, 90)]
    found = summary(runs)["10_ms"]
    assert found["best_peer"] == "quix"
    assert found["ratio"] == 2.0
    assert found["ratio_spread"] == [1.33, 2.5]
    assert found["gea"] == {"items_per_s": 100, "min": 80, "max": 120, "cpu_share": 0.5}


def test_without_peers_there_is_no_ratio() -> None:
    assert "ratio" not in summary(ran("gea", 1, 2))["10_ms"]


def test_classes_of_work_are_summed_up_apart() -> None:
    found = summary([*ran("gea", 1), *ran("gea", 5, work_ms=500)])
    assert [found[name]["gea"] for name in ("10_ms", "500_ms")] != [found["10_ms"]["gea"]] * 2


def test_another_one_begins_in_each_repeat() -> None:
    assert [turned("abc", repeat)[0] for repeat in range(4)] == ["a", "b", "c", "a"]
    assert sorted(turned("abc", 1)) == ["a", "b", "c"]


def test_items_ask_for_half_to_one_and_a_half_of_their_work_after_the_warm_up() -> None:
    assert item(WORK, 0, 0.9).startswith(b"0:0:")
    assert item(WORK, NUM_WARM_UP, 0.0).startswith(b"5000:")
    assert item(WORK, NUM_WARM_UP, 1.0).startswith(b"15000:")
    assert {len(item(work, number, 0.37)) for work in WORKS for number in (0, NUM_WARM_UP, 59_999)} == {100}


async def test_everybody_gets_the_same_items_on_every_partition() -> None:
    values = []
    for _ in range(2):
        broker = MemoryBroker()
        await broker.create_topics([TopicSpec(name=WORK.topic, num_partitions=4)])
        await fill(await broker.producer(), WORK, 4)
        values.append([(record.place, record.value) for record in broker.records(WORK.topic)])
    assert values[0] == values[1]
    assert {place for place, _ in values[0]} == {TopicPartition(WORK.topic, partition) for partition in range(4)}


def test_each_entrant_is_a_process_with_the_same_bound_on_work_in_flight() -> None:
    options = RaceOptions(bootstrap="h:1", peers_python=Path("peers"), in_flight=99, num_partitions=7)
    commands = {entrant: command(entrant, options, "t", "g", "o") for entrant in MODES}
    assert commands["gea"][0] == sys.executable
    assert {each[0] for entrant, each in commands.items() if entrant != "gea"} == {"peers"}
    assert commands["gea"][-1] == commands["faststream_batch"][-1] == "99"
    assert commands["faststream"][-2:] == ["workers", "7"]
    assert all(
        [each for each in words if each in ("h:1", "t", "g", "o")] == ["h:1", "t", "g", "o"]
        for words in commands.values()
    )


def test_a_hop_is_the_time_from_one_record_to_the_next() -> None:
    assert hops(100.0, (103, 107, 112, 118, 125), 133.0) == (7, 5, 6, 7, 8)
    assert sum(hops(100.0, (103, 107, 112, 118, 125), 133.0)) == 33


def test_what_kafka_adds_is_the_difference_of_the_percentiles() -> None:
    def passed(*ttfts: float) -> list[Passage]:
        return [Passage(ttft_ms=ttft, hops_ms=(1.0,) * 5) for ttft in ttfts]

    found = idle_figures(passed(20, 30, 50), passed(10, 12, 14))
    assert found["ttft_added_ms"] == {"p50": 18, "p99": 36}
    assert not found["is_within_target"]
    assert idle_figures(passed(20, 25, 50), passed(10, 12, 14))["is_within_target"]


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([3, 1, 2]) == {"p50": 2, "p99": 3}
    assert percentiles(range(1, 201)) == {"p50": 100, "p99": 198}
    with pytest.raises(CommandError, match="no request"):
        percentiles([])


def test_load_is_also_given_by_second_of_cpu_time() -> None:
    figures = Load(num_requests=100, num_token_records=1_000, seconds=4, cpu_s=2).figures()
    assert (figures["requests_per_s"], figures["requests_per_core_s"], figures["cores_busy"]) == (25, 50, 0.5)
    assert (figures["token_records_per_s"], figures["token_records_per_core_s"]) == (250, 500)


def test_missing_peers_are_named_with_what_installs_them(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="FastStream") as failed:
        find_peers(tmp_path / "python")
    assert any("ops/requirements/bench.txt" in line for line in failed.value.details)
    with pytest.raises(CommandError, match="has no FastStream"):
        find_peers(Path(sys.executable))


def test_tables_show_figures_and_conditions() -> None:
    passages = [Passage(ttft_ms=20, hops_ms=(1.0,) * 5)]
    found = {
        "conditions": conditions(PipelineOptions(peers_python=None), "Kafka"),
        "load": Load(num_requests=1, num_token_records=1, seconds=1, cpu_s=1).figures(),
        "idle": idle_figures(passages, passages),
        "work": summary([*ran("gea", 100), *ran("quix", 50)]),
    }
    console = Console(width=200, record=True, file=StringIO())
    for table in tables(found):
        console.print(table)
    shown = console.export_text()
    for expected in ("2 (quix)", "client → router", "requests per s", "aiokafka", "100 (100 to 100)"):
        assert expected in shown
