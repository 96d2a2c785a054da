from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from schemas.errors import ConfigError
from tests.workers.generation.engine.test_tokenizer import MERGES, NAMES, WORDS, load, sentence_piece
from workers.generation.engine.gguf_tokenizer import gguf_tokenizer
from workers.generation.engine.tokenizer_form import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level(pre: str | None = "llama-bpe", *, controls_first: bool = False, **changes: Any) -> dict[str, Any]:
    """Return the metadata of a byte-level model whose only merges make `ab` and ` ab` and `12`."""
    words = [*byte_alphabet(), "ab", "Ġab", "12"]
    controls, users = ["<|begin|>", "<|end|>"], ["<tool>"]
    tokens = [*controls, *words] if controls_first else [*words, *controls, *users]
    kinds = {**dict.fromkeys(controls, CONTROL), **dict.fromkeys(users, USER_DEFINED)}
    return {
        "tokenizer.ggml.model": "gpt2",
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2"],
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.eot_token_id": tokens.index("<|begin|>"),
        **changes,
    }


def piece_metadata() -> dict[str, Any]:
    """Return the metadata of the model of `sentence_piece("prepend")`: scores instead of merges."""
    tokens = [*NAMES, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    merged = ["".join(pair) for pair in MERGES]
    scores = [-float(merged.index(token)) if token in merged else -1e3 for token in tokens]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize("controls_first", [False, True])
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
@settings(deadline=None, max_examples=20)
@given(text=st.text(st.sampled_from("ab 12é你\n<|end|>_"), max_size=20))
def test_byte_level_text_survives_and_never_becomes_control(pre: str, controls_first: bool, text: str) -> None:
    metadata = byte_level(pre, controls_first=controls_first)
    tokenizer = gguf_tokenizer(metadata)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids.isdisjoint(ids)


def test_ids_are_those_of_the_file_and_ends_are_all_three_keys() -> None:
    metadata = byte_level()
    tokenizer = gguf_tokenizer(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokenizer.vocabulary_size == len(tokens)
    assert tokenizer.encode_control("ab<|end|> ab") == tuple(map(tokens.index, ["ab", "<|end|>", "Ġab"]))
    assert tokenizer.encode("<tool>") == (tokens.index("<tool>"),)
    assert tokenizer.token_bytes(tokens.index("<tool>")) == b"<tool>"
    assert tokenizer.eos_token_ids == {tokens.index("<|end|>"), tokens.index("<|begin|>")}


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", 2), ("qwen2", 2), ("llama-bpe", 1), ("gpt-2", 1)])
def test_digits_are_split_as_the_rule_says(pre: str, pieces: int) -> None:
    assert len(gguf_tokenizer(byte_level(pre)).encode("12")) == pieces


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from("hello []x é你\n▁"), max_size=20))
def test_pieces_are_merged_by_their_scores_as_by_merges(text: str) -> None:
    expected: Tokenizer = sentence_piece("prepend")
    ours, theirs = gguf_tokenizer(piece_metadata()), load(expected)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode_control(f"<s>{text}</s>{text}") == theirs.encode_control(f"<s>{text}</s>{text}")
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_a_model_without_a_first_space_gets_none() -> None:
    metadata = {**piece_metadata(), "tokenizer.ggml.add_space_prefix": False}
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.encode("hello") == (metadata["tokenizer.ggml.tokens"].index("hello"),)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (byte_level("dbrx"), "tokenizer.ggml.pre 'dbrx'"),
        (byte_level(None), "tokenizer.ggml.pre None"),
        ({**byte_level(), "tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert'"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}, "broken"),
        ({}, "broken"),
    ],
)
def test_other_rules_are_refused_by_name(metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        gguf_tokenizer(metadata)


def test_tokens_that_stand_twice_are_refused() -> None:
    metadata = json.loads(json.dumps(byte_level()))
    metadata["tokenizer.ggml.tokens"][3] = "ab"
    with pytest.raises(ConfigError, match="'ab' has no id of its own"):
        gguf_tokenizer(metadata)
