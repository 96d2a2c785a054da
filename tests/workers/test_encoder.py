from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from tests.workers.tiny_encoder import real_encoder_folder, write_tiny_encoder
from workers.encoder import MAX_BATCH_TOKENS, Encoder, Vectors, _batches

TEXTS = [
    "return shoes",
    "",
    "delivery days store refund a b",
    "ac unknown return return return shoes days days a b a b a b a b a b a b",
    "   \n\t ",
    "shoes",
]
REAL_TEXTS = [
    "How many days do I have to return shoes?",
    "",
    "AF-2041 🌶️ 你好 é👨‍👩‍👧",
    "Refunds are paid within 5 working days. " * 80,
    "The store opens at nine.",
]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Encoder]:
    encoder = Encoder(write_tiny_encoder(tmp_path))
    yield encoder
    encoder.close()


def reference(folder: Path, texts: list[str], max_tokens: int) -> Vectors:
    """Encode as sentence-transformers does: one text at a time, transformers' BertModel, mean, unit length."""
    from tokenizers import Tokenizer
    from transformers import BertModel

    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_tokens)
    tokenizer.no_padding()
    vectors = []
    with torch.inference_mode():
        for text in texts:
            hidden = model(input_ids=torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
            mean = hidden.mean(dim=0)
            vectors.append((mean / mean.norm()).numpy())
    return np.stack(vectors)


def test_batched_vectors_equal_transformers_one_by_one(tiny: Encoder, tmp_path: Path) -> None:
    np.testing.assert_allclose(tiny.encode(TEXTS), reference(tmp_path, TEXTS, 16), atol=1e-5)


def test_vectors_have_unit_length_and_stand_in_order(tiny: Encoder) -> None:
    vectors = tiny.encode(TEXTS)
    assert vectors.shape == (len(TEXTS), tiny.dimension) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    for place, text in enumerate(TEXTS):
        np.testing.assert_allclose(tiny.encode([text])[0], vectors[place], atol=1e-5)


def test_no_texts_give_no_vectors(tiny: Encoder) -> None:
    assert tiny.encode([]).shape == (0, tiny.dimension)


def test_text_beyond_the_limit_does_not_count(tiny: Encoder) -> None:
    at_limit = "shoes " * (tiny.max_tokens - 2)
    np.testing.assert_array_equal(tiny.encode([at_limit]), tiny.encode([at_limit + "refund " * 1000]))
    assert not np.array_equal(tiny.encode(["shoes"]), tiny.encode(["shoes refund"]))


def test_special_tokens_in_a_text_are_text(tiny: Encoder) -> None:
    assert tiny._tokenizer.encode("return [SEP] shoes").tokens.count("[SEP]") == 1


def test_half_a_surrogate_pair_is_encoded_as_unknown(tiny: Encoder) -> None:
    np.testing.assert_array_equal(tiny.encode(["shoes \ud800"]), tiny.encode(["shoes ?"]))


def test_batches_are_sorted_by_length_and_bounded() -> None:
    lengths = [3, 256, 7, 256, 100, *[256] * 40]
    batches = list(_batches(lengths))
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) * max(lengths[place] for place in batch) <= MAX_BATCH_TOKENS
    longest = [max(lengths[place] for place in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)


async def test_async_encoding_gives_the_same_vectors_off_the_loop(tiny: Encoder) -> None:
    np.testing.assert_array_equal(await tiny.encode_async(TEXTS), tiny.encode(TEXTS))


def test_identity_names_the_folder_and_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "some-encoder"
    folder.mkdir()
    encoder = Encoder(write_tiny_encoder(folder))
    encoder.close()
    name, _, digest = encoder.identity.partition("@")
    assert name == "some-encoder" and len(digest) == 12


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write_tiny_encoder(tmp_path) / name).unlink()
    with pytest.raises(ConfigError, match=name):
        Encoder(tmp_path)


@pytest.mark.parametrize("change", [{"model_type": "gpt2"}, {"hidden_size": 64}, {"num_hidden_layers": 3}])
def test_folder_of_another_architecture_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = write_tiny_encoder(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError):
        Encoder(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_vectors_of_the_cpu(tiny: Encoder, tmp_path: Path) -> None:
    on_gpu = Encoder(tmp_path, device="cuda")
    np.testing.assert_allclose(on_gpu.encode(TEXTS), tiny.encode(TEXTS), atol=1e-3)  # TF32 may be on
    on_gpu.close()


@pytest.mark.model
def test_real_weights_give_the_vectors_of_transformers() -> None:
    folder = real_encoder_folder()
    encoder = Encoder(folder)
    vectors = encoder.encode(REAL_TEXTS)
    np.testing.assert_allclose(vectors, reference(folder, REAL_TEXTS, 256), atol=1e-5)
    assert encoder.max_tokens == 256
    encoder.close()
