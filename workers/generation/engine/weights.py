"""Reads the weights of a model folder, and gives them a name that is cheap to compute.

Knows safetensors files, no forward pass. The hash covers sizes, headers and samples of the bytes, not all of them: it
tells versions and conversions apart in milliseconds, and is no proof against forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from schemas.errors import ConfigError

SAMPLE_BYTES = 4_096
NUM_SAMPLES = 256  # 1 MiB per file: below 10 ms, and every tensor of a 1B model is hit


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files by name. Raises ConfigError if there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"generation.model: no *.safetensors in {folder}")
    return files


def weights_hash(folder: Path) -> str:
    """Return a SHA-256 over `config.json` and each weights file's name, size, first bytes and evenly spaced samples."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(65_536))  # the header: names, shapes, dtypes
            for place in range(NUM_SAMPLES):
                file.seek(size * place // NUM_SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of all weights, memory-mapped. Raises ConfigError for a broken file."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"generation.model: cannot read {path}: {error}") from error
