from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ops.embedded import MissingPrerequisiteError, PreparationError, encoder_folder, language_model_folder, models

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return language_model_folder()
    except MissingPrerequisiteError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_conversion_is_kept_and_found_again(folder: Path) -> None:
    said: list[str] = []
    assert language_model_folder(say=said.append) == folder
    assert said == []
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert (folder / "model.safetensors").stat().st_size > 500_000_000


def test_control_tokens_are_single_and_the_turn_ends_with_eos(tokenizer: Any) -> None:
    assert tokenizer.encode("<|im_start|>", add_special_tokens=False) == [1]
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2] == [tokenizer.eos_token_id]


def test_chat_template_is_chatml(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == models.CHATML


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("30 days", ["3", "0", "Ġdays"]),
        ("for  2024", ["for", "ĠĠ", "2", "0", "2", "4"]),  # a digit never takes the space before it
        (" 7", ["Ġ", "7"]),
    ],
)
def test_each_digit_is_a_token_of_its_own(tokenizer: Any, text: str, tokens: list[str]) -> None:
    assert tokenizer.tokenize(text) == tokens


@pytest.mark.parametrize("text", ["🌶️ 你好 é👨‍👩‍👧", "  two  spaces\n\n\tand a tab ", "I'll 3.50 €"])
def test_text_survives_encoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_encoder_is_a_complete_folder() -> None:
    try:
        names = {path.name for path in encoder_folder().iterdir()}
    except MissingPrerequisiteError as missing:
        pytest.skip(str(missing))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_conversion_that_goes_wrong_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(gguf: Path, target: Path, step: object) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(models, "_convert_with", break_off)
    with pytest.raises(PreparationError, match="disk full"):
        language_model_folder(tmp_path)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []
