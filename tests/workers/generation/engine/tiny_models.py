"""Tiny random models of other families than Llama's, in folders as `transformers` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # far from ties between logits
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "bloom": {},
    "gemma2": {
        "tie_word_embeddings": False,
        "sliding_window": 9,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 0.7,
    },
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 9},
    "llama4_text": {"num_local_experts": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 64},
    "minimax": {"num_local_experts": 4},
    "mistral": {"sliding_window": 9},
    "mixtral": {"num_local_experts": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 48},
    "phi": {"num_key_value_heads": 4},
    "phi3": {},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
}


def save_model(folder: Path, family: str, **settings: Any) -> Any:
    """Write a random model of a family and return the one of `transformers`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **settings})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model
