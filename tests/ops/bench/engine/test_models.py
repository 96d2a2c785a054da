"""The weights of the comparison: a folder without end of sequence, and what is said where llama.cpp is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ops.bench.engine.models import find_llama_python, gguf_files, without_end
from ops.errors import CommandError


def test_the_folder_names_no_end_of_sequence_and_links_the_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"eos_token_id": 2, "hidden_size": 8}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "bos_token_id": 1}))
    (model / "model.safetensors").write_bytes(b"weights")
    folder = without_end(model, tmp_path / "copy" / "model")
    assert json.loads((folder / "config.json").read_text()) == {"hidden_size": 8}
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1}
    assert (folder / "model.safetensors").is_symlink()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == 2


def test_llama_cpp_that_nobody_asked_for_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.bench.engine.models.PEERS_FOLDER", tmp_path)
    assert find_llama_python(None, is_asked=False) is None


def test_llama_cpp_that_was_asked_for_is_missed_with_what_installs_it(tmp_path: Path) -> None:
    for python in (tmp_path / "python", Path(sys.executable)):
        with pytest.raises(CommandError, match="llama-cpp-python") as failed:
            find_llama_python(python, is_asked=False)
        assert any("9 minutes" in line for line in failed.value.details)


def test_the_file_as_it_came_needs_no_tool(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    assert gguf_files(source, ("q4_1",), tmp_path, Path(sys.executable), 1) == {"q4_1": source}


def test_a_tool_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="8 bits") as failed:
        gguf_files(tmp_path / "model.gguf", ("q4_1", "q8_0"), tmp_path, Path(sys.executable), 1)
    assert any("llama_cpp" in line for line in failed.value.details)
