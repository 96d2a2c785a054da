"""What `gea bench engine` compares: engines, precisions, workloads, profiles, how many at once. Pure.

The invariant: options that were read hold at least one of each, in the order given, none twice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from ops.errors import CommandError
from workers.generation.engine.protocol import Precision

T = TypeVar("T")
MAX_CONCURRENCY = 256


class EngineName(StrEnum):
    """Who takes part."""

    GEA = "gea"
    """Our engine in process."""
    GENERATE_BATCH = "transformers_generate_batch"
    """transformers with continuous batching."""
    GENERATE = "transformers_generate"
    """transformers, one static batch."""
    LLAMA_CPP = "llama_cpp"
    """llama.cpp through llama-cpp-python, from the GGUF file that the weights come from."""


class Workload(StrEnum):
    """What prompts look like."""

    PLAIN = "plain"
    """Prose that goes on."""
    RETRIEVAL = "retrieval"
    """Questions with passages, as the knowledge strategy asks them: answers repeat words of the passages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The length of prompts and answers in tokens. Retrieval prompts are as long as their passages allow."""

    name: str
    prompt_tokens: int
    max_tokens: int

    @property
    def context(self) -> int:
        """Return the positions that a request needs."""
        return self.prompt_tokens + self.max_tokens


SHORT_RETRIEVAL_TOKENS = 256  # two passages of the demo and a question stay below
PROFILES = {
    profile.name: profile
    for profile in (
        Profile(name="short", prompt_tokens=32, max_tokens=32),
        Profile(name="512/128", prompt_tokens=512, max_tokens=128),
        Profile(name="2048/512", prompt_tokens=2_048, max_tokens=512),
    )
}
PREFILL = Profile(name="512/1", prompt_tokens=512, max_tokens=1)
GGUF_PRECISIONS = ("q4_1", "q8_0")
FLOATS = (Precision.FP32, Precision.BF16, Precision.FP16)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What is compared. A run of one engine that takes longer than `limit_s` is broken off and its rest reckoned.

    llama.cpp takes part only with a `peers_python` that has it.
    """

    engines: tuple[EngineName, ...]
    precisions: tuple[Precision, ...]
    workloads: tuple[Workload, ...]
    profiles: tuple[Profile, ...]
    concurrency: tuple[int, ...]
    repeats: int
    limit_s: float
    threads: int
    peers_python: Path | None = None
    llama_precisions: tuple[str, ...] = ("q4_1",)
    has_extras: bool = True
    """Whether prompts alone, and one request after another, are measured too."""


def read_list(option: str, text: str, known: Mapping[str, T]) -> tuple[T, ...]:
    """Return what a list with commas names. Raises CommandError with the option and what is known."""
    names = _names(option, text)
    for name in names:
        if name not in known:
            raise CommandError(f"{option}: {name!r} is not known: {', '.join(known)}")
    return tuple(known[name] for name in names)


def read_concurrency(text: str) -> tuple[int, ...]:
    """Return how many requests run at once. Raises CommandError with the range."""
    names = _names("--concurrency", text)
    if not all(name.isdecimal() and 1 <= int(name) <= MAX_CONCURRENCY for name in names):
        raise CommandError(f"--concurrency: {text!r}: numbers from 1 to {MAX_CONCURRENCY} with commas are allowed")
    return tuple(dict.fromkeys(map(int, names)))


def entrants_of(options: EngineOptions) -> list[tuple[EngineName, str]]:
    """Return each engine with each number format that it runs in: transformers in floats, llama.cpp in GGUF's."""
    return [(engine, precision) for engine in options.engines for precision in _precisions(engine, options)]


def _precisions(engine: EngineName, options: EngineOptions) -> tuple[str, ...]:
    match engine:
        case EngineName.GEA:
            return options.precisions
        case EngineName.LLAMA_CPP:
            return options.llama_precisions
        case _:
            return tuple(each for each in options.precisions if each in FLOATS) or (Precision.FP32,)


def gea_precisions() -> dict[str, Precision]:
    """Return the number formats of ours on a CPU by name."""
    return {str(precision): precision for precision in Precision if precision is not Precision.FP8}


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _names(option: str, text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise CommandError(f"{option}: nothing is named")
    return names
