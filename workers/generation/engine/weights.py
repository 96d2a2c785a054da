"""The tensors of a Llama-family model by the names of transformers, out of safetensors files.

Knows names and shapes, no forward pass. Bytes are read with plain seeks, tensor by tensor and straight into the fused
matrix, the vocabulary's in slices: pages of a memory-mapped file would count as this process's memory until the file is
closed. The invariant: what is handed out has the shape that the configuration promises.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from schemas.errors import ConfigError
from workers.generation.engine.config import ModelConfig
from workers.generation.engine.pages import empty
from workers.generation.engine.weight_source import LayerWeights, Rows
from workers.generation.engine.weights_hash import weight_files

Shape = tuple[int, ...]
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_HEADER_BYTES = 100_000_000  # as the safetensors package has it


class NamedSource(ABC):
    """A `WeightSource` over tensors with the names of transformers."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    @abstractmethod
    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor, None if there is none of that name."""

    @abstractmethod
    def read(self, names: tuple[str, ...]) -> torch.Tensor:
        """Return tensors that are there and alike but for their first dimension, on top of each other."""

    def rows(self, name: str) -> Rows:
        """Return a matrix that is there, to be read in slices where the source can."""
        return self.read((name,))

    @property
    def config(self) -> ModelConfig:
        """Return the sizes."""
        return self._config

    def embedding(self) -> Rows:
        """Return the token embedding `(vocab, hidden)`."""
        return self._vocabulary("model.embed_tokens.weight")

    def head(self) -> Rows | None:
        """Return the output projection `(vocab, hidden)`, None where it is the embedding."""
        return None if self._config.is_tied else self._vocabulary("lm_head.weight")

    def final_norm(self) -> torch.Tensor:
        """Return the weight of the last RMSNorm `(hidden,)`."""
        return self._checked({"model.norm.weight": (self._config.hidden_size,)})

    def layer(self, number: int) -> LayerWeights:
        """Return the tensors of one layer."""
        config, prefix = self._config, f"model.layers.{number}."
        hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
        query, key = config.num_heads * head, config.num_kv_heads * head
        qkv = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
        out, down = {"self_attn.o_proj": hidden}, {"mlp.down_proj": hidden}
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        if config.model_type == "phi3":
            qkv, gate_up = {"self_attn.qkv_proj": query + 2 * key}, {"mlp.gate_up_proj": 2 * inner}

        def matrix(outputs: dict[str, int], inputs: int) -> torch.Tensor:
            return self._checked({f"{prefix}{name}.weight": (size, inputs) for name, size in outputs.items()})

        def bias(has_bias: bool, outputs: dict[str, int]) -> torch.Tensor | None:
            shapes: dict[str, Shape] = {f"{prefix}{name}.bias": (size,) for name, size in outputs.items()}
            return self._checked(shapes) if has_bias else None

        def norm(name: str, size: int) -> torch.Tensor:
            return self._checked({f"{prefix}{name}.weight": (size,)})

        return LayerWeights(
            qkv=matrix(qkv, hidden),
            out=matrix(out, query),
            gate_up=matrix(gate_up, hidden),
            down=matrix(down, inner),
            attention_norm=norm("input_layernorm", hidden),
            mlp_norm=norm("post_attention_layernorm", hidden),
            qkv_bias=bias(config.has_qkv_bias, qkv),
            out_bias=bias(config.has_out_bias, out),
            gate_up_bias=bias(config.has_mlp_bias, gate_up),
            down_bias=bias(config.has_mlp_bias, down),
            query_norm=norm("self_attn.q_norm", head) if config.has_head_norms else None,
            key_norm=norm("self_attn.k_norm", head) if config.has_head_norms else None,
        )

    def _vocabulary(self, name: str) -> Rows:
        self._check({name: (self._config.vocab_size, self._config.hidden_size)})
        return self.rows(name)

    def _checked(self, shapes: Mapping[str, Shape]) -> torch.Tensor:
        self._check(shapes)
        return self.read(tuple(shapes))

    def _check(self, shapes: Mapping[str, Shape]) -> None:
        for name, wanted in shapes.items():
            found = self.shape(name)
            if found is None:
                raise ConfigError(f"generation.model: there is no weight {name!r}")
            if found != wanted:
                raise ConfigError(f"generation.model: {name} has the shape {found}, the configuration says {wanted}")


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    start: int
    dtype: str
    shape: Shape

    def load(self, target: torch.Tensor, first: int = 0) -> None:
        """Fill a contiguous tensor of this number format with the rows from `first` on."""
        view = target.view(torch.uint8).numpy().reshape(-1).data
        row_bytes = prod(self.shape[1:]) * target.itemsize
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + first * row_bytes)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])  # at most 2 GiB at once on Linux
                if not count:
                    raise ConfigError(f"generation.model: {self.path} is cut off")
                done += count


class _FileRows:
    """A matrix in a file: each slice is read when it is asked for."""

    def __init__(self, place: _Place) -> None:
        self._place = place
        self.shape = torch.Size(place.shape)

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        first, end, step = rows.indices(self.shape[0])
        assert step == 1
        part = empty((max(0, end - first), *self.shape[1:]), DTYPES[self._place.dtype])  # (rows, inputs)
        self._place.load(part, first)
        return part


class SafetensorsSource(NamedSource):
    """A `WeightSource` over the safetensors files of a folder."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        super().__init__(config)
        self._places = {name: place for path in weight_files(folder) for name, place in _header(path).items()}

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor, None if there is none of that name."""
        found = self._places.get(name)
        return None if found is None else found.shape

    def read(self, names: tuple[str, ...]) -> torch.Tensor:
        """Read tensors on top of each other."""
        places = [self._place(name) for name in names]
        dtype = DTYPES[places[0].dtype]
        whole = empty((sum(place.shape[0] for place in places), *places[0].shape[1:]), dtype)
        for place, part in zip(places, torch.split(whole, [place.shape[0] for place in places]), strict=True):
            if DTYPES[place.dtype] is dtype:
                place.load(part)
            else:
                own = empty(place.shape, DTYPES[place.dtype])
                place.load(own)
                part.copy_(own)
        return whole

    def rows(self, name: str) -> Rows:
        """Return a matrix that is read in slices."""
        return _FileRows(self._place(name))

    def _place(self, name: str) -> _Place:
        place = self._places[name]
        if place.dtype not in DTYPES:
            raise ConfigError(f"generation.model: {name} has the number format {place.dtype!r}, which is unknown here")
        return place


def _header(path: Path) -> dict[str, _Place]:
    """Read where the tensors of a file lie: 8 bytes of length, then JSON with offsets behind it."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, path.stat().st_size):
                raise ValueError("its header is longer than the file")
            raw: dict[str, Any] = json.loads(file.read(length))
        return {
            name: _Place(path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
            for name, entry in raw.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"generation.model: cannot read {path}: {error!r}") from error
