"""The real model, natively, against its plain forward pass in transformers: the same tokens, and close logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.generation.engine.native_reference import native_library
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.config import read_config
from workers.generation.engine.native_model import NativeModel
from workers.generation.engine.native_runner import NativeRunner
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import KVPrecision, Precision
from workers.generation.engine.tokenizer import BytePairTokenizer
from workers.generation.engine.weights import SafetensorsSource

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
TEXTS = ("The capital of France is", "def add(a, b):\n    return", "请用一句话介绍北京。", "Once upon a time, " * 30)
NUM_TOKENS = 24
BLOCKS_EACH = 20


@pytest.fixture(scope="module")
def folder() -> Path:
    models = pytest.importorskip("ops.embedded")
    try:
        found: Path = models.language_model_folder()
    except models.MissingPrerequisiteError as error:
        pytest.skip(str(error))
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def load(folder: Path, weights: Precision, cache: KVPrecision) -> NativeRunner:
    config = read_config(folder)
    model = NativeModel(native_library(), SafetensorsSource(folder, config), precision=weights, max_context=512)
    shape = CacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=BLOCKS_EACH * len(TEXTS),
        block_size=16,
        precision=cache,
    )
    return NativeRunner(model, shape, identity="smollm2", num_threads=2)


def own_blocks(number: int) -> range:
    return range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH)


def plain_logits(plain: Any, ids: list[int]) -> torch.Tensor:
    """Return transformers' logits of the tokens of one text, `(len(ids), vocab)`."""
    with torch.inference_mode():
        logits: torch.Tensor = plain(torch.tensor([ids])).logits[0]
    return logits


def test_greedy_texts_in_one_batch_are_those_of_the_naive_loop(folder: Path, plain: Any) -> None:
    tokenizer = BytePairTokenizer.load(folder)
    runner = load(folder, Precision.FP32, KVPrecision.FP32)
    texts = [list(tokenizer.encode(text)) for text in TEXTS]
    lengths = [len(ids) for ids in texts]
    done = [0] * len(texts)
    for _ in range(NUM_TOKENS):
        segments = tuple(
            Segment(token_ids=ids[start:], start=start, block_table=own_blocks(number))
            for number, (ids, start) in enumerate(zip(texts, done, strict=True))
        )
        done = [len(ids) for ids in texts]
        for ids, row in zip(texts, runner.forward(StepBatch(segments=segments)), strict=True):
            ids.append(int(row.argmax()))
    for ids, length in zip(texts, lengths, strict=True):
        greedy = plain_logits(plain, ids)[length - 1 : -1].argmax(-1)
        assert greedy.tolist() == ids[length:]


@pytest.mark.parametrize(
    ("weights", "cache", "most"),
    [
        (Precision.FP32, KVPrecision.FP32, 1e-6),
        (Precision.BF16, KVPrecision.BF16, 5e-4),
        (Precision.FP16, KVPrecision.FP16, 1e-5),
        (Precision.INT8, KVPrecision.FP16, 1e-2),
        (Precision.INT8, KVPrecision.INT8, 1.5e-2),
    ],
)
def test_the_next_token_is_as_likely_as_in_the_plain_pass(
    folder: Path, plain: Any, weights: Precision, cache: KVPrecision, most: float
) -> None:
    ids = list(BytePairTokenizer.load(folder).encode(TEXTS[-1]))[:100]
    segment = Segment(token_ids=ids, start=0, block_table=own_blocks(0), num_logits=len(ids))
    given = load(folder, weights, cache).forward(StepBatch(segments=(segment,))).double().log_softmax(-1)
    wanted = plain_logits(plain, ids).double().log_softmax(-1)
    divergence = (wanted.exp() * (wanted - given)).sum(-1)  # of Kullback and Leibler, nats a token
    assert divergence.mean() < most
