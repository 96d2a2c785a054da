from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from schemas.errors import ConfigError
from tests.workers.generation.engine.test_gguf_tokenizer import byte_level
from tests.workers.generation.engine.tiny_weights import save_config, save_gguf, tensors
from tests.workers.generation.fakes import save_tokenizer
from workers.generation.engine.model_folder import (
    chat_template,
    gguf_path,
    load_tokenizer,
    model_hash,
    open_source,
    why_not_own,
)
from workers.generation.prompt import ChatTemplate


def save(path: Path) -> None:
    metadata = {**byte_level(), "tokenizer.chat_template": "{{ eos_token }}{{ messages[0]['content'] }}"}
    save_gguf(path, tensors(), **metadata)


def test_a_folder_and_its_gguf_file_give_the_same_model(tmp_path: Path) -> None:
    plain, ggufs = tmp_path / "plain", tmp_path / "ggufs"
    plain.mkdir()
    ggufs.mkdir()
    save_file(tensors(), plain / "model.safetensors")
    save_config(plain)
    save(ggufs / "model.gguf")
    for place in (ggufs, ggufs / "model.gguf"):
        assert why_not_own(place) is None
        assert torch.equal(open_source(place).layer(1).qkv, open_source(plain).layer(1).qkv)
        assert model_hash(place) == model_hash(ggufs)
    assert gguf_path(plain) is None
    assert model_hash(plain) != model_hash(ggufs)


def test_tokenizer_and_template_come_out_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    save(path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("ab 12")) == "ab 12"
    found = chat_template(path)
    assert found is not None and found[1] == {"eos_token": "<|end|>"}
    assert isinstance(ChatTemplate.load(path), ChatTemplate)
    save_gguf(path, tensors())
    assert chat_template(path) is None
    with pytest.raises(ConfigError, match=r"model\.gguf.*tokenizer"):
        load_tokenizer(path)


def test_a_tokenizer_beside_the_file_wins_with_the_ends_of_the_file(tmp_path: Path) -> None:
    save(tmp_path / "model.gguf")
    ends = load_tokenizer(tmp_path / "model.gguf").eos_token_ids
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    assert tokenizer.control_id("<|im_start|>") == 1
    assert tokenizer.eos_token_ids == ends and ends


def test_other_families_go_to_transformers_and_quantized_ones_nowhere(tmp_path: Path) -> None:
    save_config(tmp_path, model_type="gpt2")
    assert "gpt2" in (why_not_own(tmp_path) or "")
    save_config(tmp_path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="gptq"):
        why_not_own(tmp_path)


def test_places_without_one_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        why_not_own(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        save(tmp_path / name)
    with pytest.raises(ConfigError, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        why_not_own(tmp_path)
    (tmp_path / "a.gguf").write_bytes(json.dumps({}).encode())
    with pytest.raises(ConfigError, match=r"a\.gguf"):
        why_not_own(tmp_path / "a.gguf")


@pytest.mark.model
@pytest.mark.slow
def test_the_real_file_is_the_converted_model() -> None:
    models = pytest.importorskip("ops.embedded.models")
    try:
        folder, path = models.language_model_folder(), models._gguf_file()
    except models.MissingPrerequisiteError as error:
        pytest.skip(str(error))
    found, expected = open_source(path), open_source(folder)
    assert found.config == expected.config
    assert torch.equal(found.embedding()[:], expected.embedding()[:])
    for number in (0, found.config.num_layers - 1):
        assert torch.equal(found.layer(number).qkv, expected.layer(number).qkv)
        assert torch.equal(found.layer(number).down, expected.layer(number).down)
    ours, theirs = load_tokenizer(path), load_tokenizer(folder)
    for text in ("Returns within 30 days,  2024\n你好 🌶️", "It's  3.14\n\n\tx = 12", "<|im_end|>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode_control(text) == theirs.encode_control(text)
    assert ours.eos_token_ids == theirs.eos_token_ids
