"""Finds the weight files of a model, and gives their content a name that is cheap to compute.

The hash covers sizes, headers and samples of the bytes, not all of them: it tells versions and conversions apart in
milliseconds, and is no proof against forgery.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from schemas.errors import ConfigError

SAMPLE_BYTES = 4_096
NUM_SAMPLES = 256  # 1 MiB per file: below 10 ms, and every tensor of a 1B model is hit


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers would read, by name.

    Raises ConfigError if there is none, or if one is missing that the index names.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if index.exists():
        files = _indexed(index)
    if not files:
        raise ConfigError(f"generation.model: no *.safetensors in {folder}")
    for path in files:
        if not path.exists():
            raise ConfigError(f"generation.model: {path} is missing, {index.name} names it")
    return files


def _indexed(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [index.parent / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"generation.model: cannot read {index}: {error!r}") from error


def weights_hash(folder: Path) -> str:
    """Return a SHA-256 over `config.json` and each weights file's name, size, first bytes and evenly spaced samples."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        sample_file(path, digest)
    return digest.hexdigest()


def sample_file(path: Path, digest: hashlib._Hash) -> None:
    """Add a file's name, size, first bytes and evenly spaced samples to a digest."""
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}:".encode())
    with path.open("rb") as file:
        digest.update(file.read(65_536))  # the header: names, shapes, dtypes
        for place in range(NUM_SAMPLES):
            file.seek(size * place // NUM_SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
