"""What is loaded through `transformers`, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from schemas.errors import ConfigError
from tests.workers.generation.engine.tiny_models import save_model
from workers.generation.engine.protocol import Precision
from workers.generation.engine.transformers_check import check_paged_run
from workers.generation.engine.transformers_model import CausalModel, load_causal_model
from workers.generation.engine.transformers_probe import UnsupportedError

pytestmark = pytest.mark.slow  # each builds, writes and reads a model; importing them takes seconds


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(folder: Path, *, precision: Precision = Precision.FP32, max_context: int = 100) -> CausalModel:
    return load_causal_model(folder, precision=precision, device=torch.device("cpu"), max_context=max_context)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bert", "attention masks that are neither causal nor sliding windows"),
        ("bloom", "its attention cannot be replaced"),  # ALiBi in code of its own
        ("gpt_oss", "attention with s_aux"),
        ("llama4_text", "attention masks that are neither causal nor sliding windows"),  # chunks of 16
        ("minimax", r"layers without attention of their own: \[1\]"),  # linear attention
    ],
)
def test_a_model_beyond_the_paged_attention_is_refused_by_name(tmp_path: Path, family: str, reason: str) -> None:
    name = type(save_model(tmp_path, family)).__name__
    with pytest.raises(ConfigError, match=f"{name} is not supported: {reason}"):
        load(tmp_path)


def test_chunked_attention_is_served_where_the_context_is_one_chunk(tmp_path: Path) -> None:
    save_model(tmp_path, "llama4_text", attention_chunk_size=64)
    assert load(tmp_path, max_context=64).attention.windows == (None, None, None)
    with pytest.raises(ConfigError, match="neither causal"):
        load(tmp_path, max_context=65)


@pytest.mark.parametrize(
    ("family", "windows"),
    [("mistral", (9, 9, 9)), ("gemma2", (9, None, 9)), ("opt", (None, None, None))],
)
def test_windows_are_those_of_the_models_masks(tmp_path: Path, family: str, windows: tuple[int | None, ...]) -> None:
    save_model(tmp_path, family)
    assert load(tmp_path).attention.windows == windows


def test_a_window_beyond_the_checked_prompt_is_found(tmp_path: Path) -> None:
    save_model(tmp_path, "mistral", sliding_window=77)
    assert load(tmp_path).attention.windows == (77, 77, 77)
    assert load(tmp_path, max_context=77).attention.windows == (None, None, None)


def test_a_model_that_counts_positions_itself_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2")
    model = load(tmp_path)

    def count(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (torch.arange(inputs[0].shape[1])[None],)

    model.module.transformer.wpe.register_forward_pre_hook(count)
    with pytest.raises(UnsupportedError, match="off its plain run"):
        check_paged_run(model.module, model.attention)


def test_the_context_is_lowered_to_what_the_model_knows(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2")
    assert load(tmp_path, max_context=4_000).max_context == 128


def test_rope_that_depends_on_the_longest_context_is_kept_where_it_does_not(tmp_path: Path) -> None:
    """Beyond the original length one long context would turn the keys of all its neighbours in the batch."""
    factors = [1.0] * 6
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": factors, "long_factor": factors}
    save_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert load(tmp_path).max_context == 64


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_half_precision_is_loaded(tmp_path: Path, precision: Precision) -> None:
    save_model(tmp_path, "gpt2")
    assert load(tmp_path, precision=precision).module.dtype.itemsize == 2


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
def test_8_bit_weights_are_refused(tmp_path: Path, precision: Precision) -> None:
    save_model(tmp_path, "gpt2")
    with pytest.raises(ConfigError, match=r"generation\.precision"):
        load(tmp_path, precision=precision)


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="has quantized weights"):
        load(tmp_path)


def test_a_missing_weight_is_refused_and_not_made_up(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the weights .*h\.1\.mlp\.c_fc\.weight"):
        load(tmp_path)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    model = save_model(tmp_path, "gpt2")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load(tmp_path)


def test_what_is_no_causal_language_model_is_refused(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    ViTModel(
        ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'vit' is no causal language model"):
        load(tmp_path)
