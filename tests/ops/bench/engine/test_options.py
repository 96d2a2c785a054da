"""What is compared: lists are read in their order, and what is not known is named with what is."""

from __future__ import annotations

import pytest

from ops.bench.engine.options import (
    PROFILES,
    EngineName,
    EngineOptions,
    Workload,
    entrants_of,
    gea_precisions,
    read_concurrency,
    read_list,
)
from ops.errors import CommandError
from workers.generation.engine.protocol import Precision


def options(*precisions: Precision) -> EngineOptions:
    return EngineOptions(
        engines=tuple(EngineName),
        precisions=precisions,
        workloads=(Workload.PLAIN,),
        profiles=(PROFILES["short"],),
        concurrency=(1,),
        repeats=1,
        limit_s=1.0,
        threads=1,
    )


def test_lists_keep_their_order_and_name_nothing_twice() -> None:
    assert read_list("--profile", "512/128, short,512/128", PROFILES) == (PROFILES["512/128"], PROFILES["short"])
    assert read_concurrency("32,1, 8,1") == (32, 1, 8)


@pytest.mark.parametrize("text", ["0", "257", "-1", "1.5", "x", "1,,x"])
def test_concurrency_out_of_range_is_named_with_the_range(text: str) -> None:
    with pytest.raises(CommandError, match=r"--concurrency.*1 to 256"):
        read_concurrency(text)


def test_what_is_not_known_is_named_with_what_is() -> None:
    with pytest.raises(CommandError, match=r"--profile: 'long' is not known: short, 512/128, 2048/512"):
        read_list("--profile", "short,long", PROFILES)
    with pytest.raises(CommandError, match="nothing is named"):
        read_list("--profile", " , ", PROFILES)


def test_transformers_runs_in_the_floats_asked_for_or_in_fp32_and_llama_in_its_own() -> None:
    both = entrants_of(options(Precision.INT8, Precision.BF16))
    assert (EngineName.GENERATE, "bf16") in both
    assert [precision for engine, precision in both if engine is EngineName.GEA] == ["int8", "bf16"]
    only = dict(entrants_of(options(Precision.INT8)))
    assert only[EngineName.GENERATE] == only[EngineName.GENERATE_BATCH] == "fp32"
    assert only[EngineName.LLAMA_CPP] == "q4_1"


def test_formats_of_cuda_alone_are_not_offered() -> None:
    assert sorted(gea_precisions()) == ["bf16", "fp16", "fp32", "int8"]
