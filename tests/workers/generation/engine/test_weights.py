from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from schemas.errors import ConfigError
from tests.workers.generation.engine.tiny_weights import TINY, TensorSource, save_config, tensors
from workers.generation.engine.weights import SafetensorsSource
from workers.generation.engine.weights_hash import weight_files, weights_hash


def save_sharded(folder: Path) -> None:
    weights = tensors()
    names = sorted(weights)
    files = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_parts_are_fused_in_their_order(tmp_path: Path) -> None:
    weights = tensors()
    save_file(weights, tmp_path / "model.safetensors")
    layer = SafetensorsSource(tmp_path, TINY).layer(1)
    prefix = "model.layers.1."
    parts = [weights[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(parts))
    assert torch.equal(
        layer.gate_up, torch.cat([weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    )
    assert torch.equal(layer.down, weights[f"{prefix}mlp.down_proj.weight"])
    assert layer.qkv_bias is None and layer.query_norm is None


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    save_file({"model.norm.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")  # not in the index
    source, expected = SafetensorsSource(tmp_path, TINY), TensorSource(tensors(), TINY)
    assert torch.equal(source.layer(0).qkv, expected.layer(0).qkv)
    assert torch.equal(source.final_norm(), expected.final_norm())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002.safetensors is missing"):  # noqa: RUF043
        weight_files(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_number_formats_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    save_file(weights, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, TINY)
    assert torch.equal(source.embedding()[:], weights["model.embed_tokens.weight"])


def test_parts_of_different_formats_take_that_of_the_first(tmp_path: Path) -> None:
    weights = tensors()
    key = "model.layers.0.self_attn.k_proj.weight"
    weights[key] = weights[key].half()
    save_file(weights, tmp_path / "model.safetensors")
    qkv = SafetensorsSource(tmp_path, TINY).layer(0).qkv
    assert qkv.dtype is torch.float32
    assert torch.equal(qkv[32:48], weights[key].float())


def test_tied_head_is_none_and_an_untied_one_is_read(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    head = SafetensorsSource(tmp_path, TINY).head()
    assert head is not None and torch.equal(head[:], tensors()["lm_head.weight"])
    assert SafetensorsSource(tmp_path, replace(TINY, is_tied=True)).head() is None


def test_missing_and_misshapen_weights_are_named() -> None:
    weights = tensors()
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(ConfigError, match=f"{name} has the shape"):
        TensorSource({**weights, name: torch.zeros(3, 3)}, TINY).layer(1)
    del weights[name]
    with pytest.raises(ConfigError, match=f"no weight '{name}'"):
        TensorSource(weights, TINY).layer(1)
    with pytest.raises(ConfigError, match=r"q_proj\.bias"):
        TensorSource(weights, replace(TINY, has_qkv_bias=True)).layer(0)


def test_a_format_without_floats_is_named(tmp_path: Path) -> None:
    weights = tensors()
    name = "model.norm.weight"
    save_file({**weights, name: torch.zeros(32, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} has the number format 'I8'"):
        SafetensorsSource(tmp_path, TINY).final_norm()


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        SafetensorsSource(tmp_path, TINY)
    save_file(tensors(), path)
    whole = path.read_bytes()
    for content in (b"", whole[:100], b"\xff" * 64, len(whole).to_bytes(8, "little") + b"[]"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            SafetensorsSource(tmp_path, TINY)
    path.write_bytes(whole[:-10])
    with pytest.raises(ConfigError, match="cut off"):
        source = SafetensorsSource(tmp_path, TINY)
        for number in range(2):
            source.layer(number)
        source.embedding()[:]
        (source.head() or source.embedding())[:]
        source.final_norm()


def test_slices_of_the_vocabulary_are_its_rows(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    rows, weight = SafetensorsSource(tmp_path, TINY).embedding(), tensors()["model.embed_tokens.weight"]
    assert rows.shape == weight.shape
    for part in (slice(0, 5), slice(40, 100), slice(7, 7), slice(-3, None), slice(60, 90)):
        assert torch.equal(rows[part], weight[part])


def test_reading_maps_no_file_into_memory(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, TINY)
    layer = source.layer(0)
    maps = Path(f"/proc/{os.getpid()}/maps")
    assert layer.qkv.numel()
    assert not maps.exists() or str(tmp_path) not in maps.read_text()


def test_hash_tells_weights_apart(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    save_config(tmp_path)
    before = weights_hash(tmp_path)
    assert before == weights_hash(tmp_path)
    path = tmp_path / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert weights_hash(tmp_path) != before
