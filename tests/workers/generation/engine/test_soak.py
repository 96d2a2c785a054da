"""Half an hour of everything at once on the real model: nothing leaks, nothing is lost, a case has one answer only."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from schemas.errors import InternalError, InvalidRequestError
from schemas.tokens import FinishReason
from tests.workers.generation.engine.asking import assert_at_rest
from workers.generation.engine.batch import StepBatch
from workers.generation.engine.loader import Loaded, load
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import (
    ConstraintKind,
    ConstraintSpec,
    EngineRequest,
    Finished,
    Precision,
    SamplingParams,
    TokenChunk,
)
from workers.generation.engine.settings import Backend, LocalEngineSettings, Preemption

_log = structlog.get_logger(__name__)
pytestmark = [pytest.mark.soak, pytest.mark.model]
SOAK_S = 1_800.0
NUM_ROUNDS = 30
NUM_CLIENTS = 24
FAULT_SHARE = 0.01  # of the calls of the runner
GROWTH_MB = 24.0  # of the last third's rounds over the second's: allocators breathe
SETTINGS = LocalEngineSettings(
    max_sequences=16,
    max_context=512,
    kv_cache_tokens=448,  # for 16 sequences of up to 400: they push each other out
    preemption=Preemption.SWAP,
    max_swap_bytes=4 << 20,  # about 11 blocks: what does not fit is read again
    precision=Precision.INT8,
    backend=Backend.NATIVE,
    device="cpu",
    num_threads=1,
)
FORMS = (
    ConstraintSpec(kind=ConstraintKind.JSON_OBJECT),
    ConstraintSpec(kind=ConstraintKind.REGEX, value=r"[a-z]{3,12}( [a-z]{3,12}){2}\."),
    ConstraintSpec(kind=ConstraintKind.CHOICE, value=json.dumps(["yes", "no", "perhaps", "也许"])),
    ConstraintSpec(
        kind=ConstraintKind.JSON_SCHEMA,
        value='{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}',
    ),
)
TEXTS = (
    "Describe the sea in one sentence.",
    "def add(a, b):\n    return a + b\n\n" * 6 + "def add(",
    "请用一句话介绍北京。 🙂🙃",
    "The report says: all engines ran, all engines ran, all engines ran. Repeat the report. " * 4,
    "One day a fox and a crow met in the wood. " * 12,
)


class Faults:
    """A runner that fails now and then, each time in another way."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._random = random.Random(7)
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._fail(RuntimeError("a kernel failed"), torch.OutOfMemoryError("out of memory"), MemoryError())
        logits: torch.Tensor = self._runner.forward(batch)
        if len(logits) and self._random.random() < FAULT_SHARE:
            self.count += 1
            logits = logits.clone()
            logits[self._random.randrange(len(logits))] = self._random.choice((float("nan"), float("inf")))
        return logits

    @property
    def cache(self) -> Any:
        return self

    def clear_blocks(self, blocks: Any) -> None:
        self._runner.cache.clear_blocks(blocks)

    def copy_block(self, source: int, target: int) -> None:
        self._fail(RuntimeError("no copy"))
        self._runner.cache.copy_block(source, target)

    def read_blocks(self, blocks: Any) -> object:
        self._fail(MemoryError())
        found: object = self._runner.cache.read_blocks(blocks)
        return found

    def write_blocks(self, blocks: Any, content: object) -> None:
        self._fail(RuntimeError("no way back"))
        self._runner.cache.write_blocks(blocks, content)

    def _fail(self, *errors: Exception) -> None:
        if self._random.random() < FAULT_SHARE:
            self.count += 1
            raise self._random.choice(errors)


@dataclass
class Tally:
    """What clients saw. `texts` are the whole answers by case and choice: there may be one of each only."""

    ends: Counter[str] = field(default_factory=Counter)
    texts: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    pieces: list[tuple[tuple[int, int], tuple[int, ...]]] = field(default_factory=list)
    num_submitted: int = 0
    num_tokens: int = 0


def cases(engine: LocalEngine) -> list[EngineRequest]:
    """Return requests of every kind; a case always has the same answer."""
    draw = random.Random(11)
    prompts = [engine.tokenizer.encode_control(f"<|im_start|>user\n{text}<|im_end|>\n") for text in TEXTS]
    made = []
    for number in range(60):
        sampling = SamplingParams(
            max_tokens=draw.choice((1, 8, 40, 120, 240)),
            temperature=draw.choice((0.0, 0.0, 0.7, 1.5)),
            top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((0, 20)),
            min_p=draw.choice((0.0, 0.05)),
            repetition_penalty=draw.choice((1.0, 1.1)),
            presence_penalty=draw.choice((0.0, 0.5)),
            seed=number,
            stop=draw.choice(((), (), (".",), ("\n\n", "the"))),
            stop_token_ids=frozenset(draw.choice(((), (30,)))),
            logprobs=draw.choice((None, None, 3)),
            n=draw.choice((1, 1, 1, 2, 4)),
            constraint=draw.choice((None, None, *FORMS)),
        )
        prompt = draw.choice(prompts)
        made.append(
            EngineRequest(
                request_id=str(number),
                prompt=prompt[: draw.randint(1, len(prompt))],
                sampling=sampling,
                priority=draw.choice((0, 0, 0, 1, -1)),
                cache_salt=draw.choice(("", "a", "b")),
            )
        )
    return made


async def client(
    engine: LocalEngine, known: list[EngineRequest], draw: random.Random, end_s: float, tally: Tally
) -> None:
    while time.monotonic() < end_s:
        case = draw.randrange(len(known))
        tally.num_submitted += 1
        request = replace(known[case], request_id=f"r{tally.num_submitted}", priority=draw.choice((0, 0, 1, -1)))
        if draw.random() < 0.03:
            broken = ConstraintSpec(kind=ConstraintKind.REGEX, value="(")
            request = replace(request, sampling=replace(request.sampling, constraint=broken))
        await _answer(engine, request, case, draw.choice((None, None, None, 0, 1, draw.randrange(80))), tally)


async def _answer(engine: LocalEngine, request: EngineRequest, case: int, patience: int | None, tally: Tally) -> None:
    """Read an answer to its one end, or break it off after `patience` events; None has all the patience."""
    stream = engine.submit(request)
    drawn: dict[int, list[int]] = {index: [] for index in range(request.sampling.n)}
    finished: Finished | None = None
    num_events = 0
    if patience == 0:
        engine.abort(request.request_id)
    try:
        async for event in stream:
            assert finished is None, "nothing follows the end"
            if isinstance(event, TokenChunk):
                drawn[event.index] += event.token_ids
            else:
                finished = event
            num_events += 1
            if num_events == patience:
                engine.abort(request.request_id)
    except (InternalError, InvalidRequestError) as error:
        assert finished is None
        tally.ends[type(error).__name__] += 1
        return
    assert finished is not None
    assert finished.usage.completion_tokens == sum(map(len, drawn.values()))
    tally.num_tokens += finished.usage.completion_tokens
    for end in finished.choices:
        tally.ends[end.finish_reason] += 1
        tally.pieces.append(((case, end.index), tuple(drawn[end.index])))
        if end.finish_reason is not FinishReason.ABORT:
            tally.texts.setdefault((case, end.index), tuple(drawn[end.index]))
            assert tally.texts[case, end.index] == tuple(drawn[end.index])


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096 / 1e6


async def run_round(engine: LocalEngine, known: list[EngineRequest], number: int, tally: Tally) -> tuple[float, ...]:
    """Keep all clients busy, let them end, and return (megabytes, objects, tokens for each second of processor)."""
    used_s, before = time.process_time(), tally.num_tokens
    end_s = time.monotonic() + SOAK_S / NUM_ROUNDS
    draws = [random.Random(1_000 * number + place) for place in range(NUM_CLIENTS)]
    await asyncio.gather(*(client(engine, known, draw, end_s, tally) for draw in draws))
    rate = (tally.num_tokens - before) / (time.process_time() - used_s)
    for key, tokens in tally.pieces:
        assert tally.texts.get(key, tokens)[: len(tokens)] == tokens, "what was cut off begins as the whole does"
    tally.pieces.clear()
    gc.collect()
    found = engine.statistics()
    assert (found.active_blocks, found.running, found.waiting, found.tokens_in_flight) == (0, 0, 0, 0)
    assert_at_rest(engine)
    return resident_mb(), len(gc.get_objects()), rate


@pytest.fixture
def folder() -> Path:
    models = pytest.importorskip("ops.embedded")
    try:
        found: Path = models.language_model_folder()
    except models.MissingPrerequisiteError as error:
        pytest.skip(str(error))
    return found


@pytest.mark.timeout(SOAK_S + 900)
async def test_a_soak_of_mixed_cancelled_and_failing_requests_leaks_nothing(folder: Path) -> None:
    faults: list[Faults] = []

    def failing(folder: Path, given: LocalEngineSettings) -> Loaded:
        loaded = load(folder, given)
        faults.append(Faults(loaded.core._runner))
        loaded.core._runner = faults[0]
        return loaded

    engine = LocalEngine(folder, SETTINGS, load_model=failing)
    await engine.start()
    known, tally, rounds = cases(engine), Tally(), []
    for number in range(NUM_ROUNDS):
        rounds.append(await run_round(engine, known, number, tally))
        megabytes, objects, rate = rounds[-1]
        found = engine.statistics()
        _log.info(
            "soak_round",
            number=number,
            megabytes=round(megabytes, 1),
            objects=objects,
            tokens_per_cpu_s=round(rate, 1),
            requests=tally.num_submitted,
            tokens=tally.num_tokens,
            preemptions=found.num_preemptions,
            swaps=found.swap_ops,
            faults=faults[0].count,
            ends=dict(tally.ends),
        )
    await engine.stop()
    third = NUM_ROUNDS // 3
    middle, last = (mean(rounds[start : start + third]) for start in (third, 2 * third))
    assert last[0] - middle[0] < GROWTH_MB
    assert last[1] - middle[1] < 2_000
    assert last[2] > 0.7 * middle[2]
    assert found.num_preemptions and found.swap_ops and faults[0].count and tally.ends["InternalError"]


def mean(rounds: list[tuple[float, ...]]) -> list[float]:
    return [sum(figures) / len(figures) for figures in zip(*rounds, strict=True)]
