from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from schemas.errors import ConfigError
from workers.generation.engine import gguf_file
from workers.generation.engine.gguf_file import GgufFile

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")


def save(path: Path, numbers: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.text", "é")
    writer.add_bool("a.flag", True)
    writer.add_int64("a.number", -5)
    writer.add_array("a.strings", ["x", "", "yz"])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_tensor("other", np.ones(5, dtype=np.float32))
    writer.add_tensor("weight", numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return rows of quantized numbers: random bytes where the package has no way there, scales among them."""
    numbers = np.random.default_rng(1).standard_normal((12, 512)).astype(np.float32)
    try:
        found: np.ndarray = gguf.quants.quantize(numbers, kind)
        return found
    except NotImplementedError:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        return np.random.default_rng(1).integers(0, 60, (12, 512 // block_size * block_bytes), dtype=np.uint8)


def test_metadata_is_read(tmp_path: Path) -> None:
    save(tmp_path / "x.gguf", np.ones((2, 32), dtype=np.float32), gguf.GGMLQuantizationType.F32)
    metadata = GgufFile(tmp_path / "x.gguf").metadata
    assert [metadata[f"a.{name}"] for name in ("text", "flag", "number")] == ["é", True, -5]
    assert (metadata["a.strings"], metadata["a.floats"]) == (["x", "", "yz"], [0.5, 1.5])


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_are_expanded_slice_by_slice(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = gguf.GGMLQuantizationType[name]
    save(tmp_path / "x.gguf", quantized(kind), kind)
    monkeypatch.setattr(gguf_file, "SLICE_NUMBERS", 5 * 512)  # 12 rows in three slices
    expected = torch.from_numpy(gguf.quants.dequantize(quantized(kind), kind))
    assert expected.abs().sum() > 0
    assert torch.equal(GgufFile(tmp_path / "x.gguf").read("weight"), expected)


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16)])
def test_floats_keep_their_format(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    numbers = torch.randn(6, 32).to(dtype)
    save(tmp_path / "x.gguf", numbers.numpy(), gguf.GGMLQuantizationType[name])
    file = GgufFile(tmp_path / "x.gguf")
    assert torch.equal(file.read("weight"), numbers)
    assert torch.equal(file.read("other"), torch.ones(5))


def test_bfloat16_keeps_its_format(tmp_path: Path) -> None:
    numbers = torch.randn(6, 32).bfloat16()
    raw = numbers.view(torch.uint8).numpy()
    save(tmp_path / "x.gguf", raw, gguf.GGMLQuantizationType.BF16)
    assert torch.equal(GgufFile(tmp_path / "x.gguf").read("weight"), numbers)


def test_types_that_cannot_be_expanded_are_named(tmp_path: Path) -> None:
    save(tmp_path / "x.gguf", np.zeros((2, 32), dtype=np.int8), gguf.GGMLQuantizationType.I8)
    with pytest.raises(ConfigError, match="weight: I8 cannot be expanded"):
        GgufFile(tmp_path / "x.gguf").read("weight")


def test_a_file_that_is_cut_off_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    save(path, np.ones((2, 32), dtype=np.float32), gguf.GGMLQuantizationType.F32)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"x\.gguf"):
            GgufFile(path).read("weight")


def test_lengths_beyond_the_file_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60))
    with pytest.raises(ConfigError, match="beyond the file"):
        GgufFile(path)
    path.write_bytes(b"GGML" + bytes(40))
    with pytest.raises(ConfigError, match="no GGUF file"):
        GgufFile(path)
