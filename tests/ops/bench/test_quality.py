"""The quality bench: perplexity of known models, cut into chunks or not, and where two answers part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ops.bench.blank_runner import VOCAB_SIZE, BlankRunner
from ops.bench.quality import QualityOptions, first_difference, perplexity, run_quality
from ops.bench.quality_report import tables
from tests.workers.generation.engine.test_model import save_tiny_model
from tests.workers.generation.fakes import save_tokenizer
from workers.generation.engine.batch import StepBatch
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import KVPrecision
from workers.generation.engine.settings import Backend

SHAPE = CacheShape(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=1, block_size=16, precision=KVPrecision.FP32)
TEXT = tuple(number * 7 % 250 for number in range(120))


class Successor(BlankRunner):
    """Expects each token to be followed by the one seven further, with odds of `odds` to one against all others."""

    def __init__(self, odds: float) -> None:
        super().__init__(num_blocks=8, shape=SHAPE)
        self.odds = odds
        self.starts: list[int] = []

    def forward(self, batch: StepBatch) -> torch.Tensor:
        (segment,) = batch.segments
        assert len(segment.block_table) * 16 >= segment.end
        self.starts.append(segment.start)
        logits = torch.zeros(len(segment.token_ids), VOCAB_SIZE)
        for row, token_id in enumerate(segment.token_ids):
            logits[row, (token_id + 7) % 250] = math.log(self.odds * (VOCAB_SIZE - 1))
        return logits


def test_a_model_without_an_opinion_has_the_perplexity_of_its_vocabulary() -> None:
    assert perplexity(Successor(odds=1 / (VOCAB_SIZE - 1)), TEXT) == pytest.approx(VOCAB_SIZE)


def test_a_model_that_expects_the_next_token_with_three_quarters_has_four_thirds() -> None:
    assert perplexity(Successor(odds=3.0), TEXT) == pytest.approx(4 / 3)


@pytest.mark.parametrize("chunk", [1, 7, 16, 119, 500])
def test_chunks_cover_every_token_once(chunk: int) -> None:
    runner = Successor(odds=3.0)
    assert perplexity(runner, TEXT, chunk) == pytest.approx(4 / 3)
    assert runner.starts == list(range(0, len(TEXT) - 1, chunk))


@pytest.mark.parametrize(
    ("one", "other", "place"), [([1, 2], [1, 2], None), ([1, 2], [3, 2], 0), ([1, 2], [1, 3], 1), ([1, 2], [1], 1)]
)
def test_answers_part_after_their_equal_tokens(one: Sequence[int], other: Sequence[int], place: int | None) -> None:
    assert first_difference(one, other) == place


@pytest.mark.slow
async def test_number_formats_of_a_tiny_model_are_close_to_fp32_and_int8_ignores_its_neighbours(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    save_tiny_model(tmp_path)
    options = QualityOptions(folder=tmp_path, backend=Backend.TORCH, max_tokens=100, num_drawn=6, threads=1)
    found = await run_quality(options, lambda text: None)
    rows = found["perplexity"]
    assert (rows[0]["precision"], rows[0]["above_fp32_percent"], rows[0]["met"]) == ("fp32", 0.0, True)
    assert all(abs(row["above_fp32_percent"]) < 10 for row in rows)
    assert [(row["at_once"], row["first_difference"], row["met"]) for row in found["divergence"]] == [
        (8, None, True),
        (32, None, True),
    ]
    console = Console(width=200, record=True, file=StringIO())
    for table in tables(found):
        console.print(table)
    assert "none in 6" in console.export_text()
