"""Reads a GGUF file: its metadata and, one at a time, its tensors as floats.

Knows the format, no models: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Bytes are read with plain seeks
and expanded slice by slice, so that a load never holds more than one tensor. The invariant: nothing is read beyond the
end of the file, whatever its header says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from schemas.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SLICE_NUMBERS = 1 << 22  # expanded at once: 16 MiB
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # the types that torch has


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies. `shape` is in torch's order, `kind` the number of its ggml type."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """The header of a file. `metadata` maps keys to numbers, strings, booleans and lists of these."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises ConfigError for what is no GGUF file, or a broken one."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._read_header(file, path.stat().st_size)
        except (OSError, ValueError, struct.error, KeyError, UnicodeDecodeError, MemoryError) as error:
            raise ConfigError(f"generation.model: cannot read {path}: {error!r}") from error

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is, or expanded to fp32. Raises ConfigError where its type cannot be expanded."""
        tensor = self.tensors[name]
        block_size, block_bytes = self._blocks(name, tensor.kind)
        row_bytes = tensor.shape[-1] // block_size * block_bytes
        rows = torch.Size(tensor.shape[:-1]).numel()
        dtype = FLOATS.get(tensor.kind, torch.float32)
        whole = torch.empty((rows, tensor.shape[-1]), dtype=dtype)
        step = max(1, SLICE_NUMBERS // tensor.shape[-1])
        with self.path.open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            for row in range(0, rows, step):
                part = whole[row : row + step]
                raw = bytearray(len(part) * row_bytes)
                if file.readinto(raw) != len(raw):
                    raise ConfigError(f"generation.model: {self.path} is cut off in {name}")
                part.copy_(self._floats(name, tensor.kind, raw, part))
        return whole.view(tensor.shape)

    def _floats(self, name: str, kind: int, raw: bytearray, like: torch.Tensor) -> torch.Tensor:
        if kind in FLOATS:
            return torch.frombuffer(raw, dtype=like.dtype).view(like.shape)
        import gguf

        quantized = np.frombuffer(raw, dtype=np.uint8).reshape(len(like), -1)
        try:
            wide = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType(kind))
        except NotImplementedError as error:
            raise ConfigError(
                f"generation.model: {self.path}: {name}: {_type_name(kind)} cannot be expanded"
            ) from error
        return torch.from_numpy(np.ascontiguousarray(wide, dtype=np.float32))

    def _blocks(self, name: str, kind: int) -> tuple[int, int]:
        """Return how many numbers make a block of a type, and its bytes."""
        import gguf

        try:
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (KeyError, ValueError) as error:
            raise ConfigError(f"generation.model: {self.path}: {name} has the unknown type {kind}") from error
        return int(block_size), int(block_bytes)

    def _read_header(self, file: BinaryIO, size: int) -> None:
        reader = _Reader(file, size)
        if reader.take(4) != MAGIC:
            raise ValueError("it is no GGUF file")
        version = reader.number("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not supported, only {VERSIONS}")
        num_tensors, num_keys = reader.number("<Q"), reader.number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = reader.string()
            self.metadata[key] = reader.value(reader.number("<I"))
        places = dict(reader.tensor() for _ in range(num_tensors))
        alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        start = -(-file.tell() // alignment) * alignment
        self.tensors = {
            name: GgufTensor(shape=shape, kind=kind, offset=start + offset)
            for name, (shape, kind, offset) in places.items()
        }


class _Reader:
    """Takes values off a header that is at most as long as the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def take(self, count: int) -> bytes:
        if count > self._size:
            raise ValueError("a length in its header is beyond the file")
        found = self._file.read(count)
        if len(found) != count:
            raise ValueError("its header is cut off")
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        return self.number(SCALARS[kind])

    def tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self.string()
        shape = tuple(self.number("<Q") for _ in range(self.number("<I")))
        return name, (shape[::-1], self.number("<I"), self.number("<Q"))

    def _array(self) -> list[Any]:
        kind, count = self.number("<I"), self.number("<Q")
        if count > self._size:
            raise ValueError("a length in its header is beyond the file")
        if kind in SCALARS:
            form = f"<{count}{SCALARS[kind][1:]}"
            return list(struct.unpack(form, self.take(struct.calcsize(form))))
        read: Callable[[], Any] = self.string if kind == STRING else self._array
        return [read() for _ in range(count)]


def _type_name(kind: int) -> str:
    import gguf

    return str(gguf.GGMLQuantizationType(kind).name)
