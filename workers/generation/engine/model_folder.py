"""What lies at `generation.model`: a folder in the form of transformers, a folder with one GGUF file, or such a file.

Knows which reader is for what, no forward pass. The invariant: nobody else looks at the form of a model's files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from schemas.errors import ConfigError
from workers.generation.engine.config import read_config, read_raw_config, why_not_native
from workers.generation.engine.gguf_file import GgufFile
from workers.generation.engine.gguf_source import GgufSource, read_gguf_config
from workers.generation.engine.gguf_tokenizer import end_ids, gguf_tokenizer
from workers.generation.engine.tokenizer import BytePairTokenizer
from workers.generation.engine.weight_source import WeightSource
from workers.generation.engine.weights import SafetensorsSource
from workers.generation.engine.weights_hash import sample_file, weights_hash

SUFFIX = ".gguf"
TEMPLATE = "tokenizer.chat_template"


def why_not_own(place: Path) -> str | None:
    """Return what the engine's own models lack for a model, None where nothing: then transformers may run it.

    Raises ConfigError by key and value for one that nobody here can.
    """
    path = gguf_path(place)
    if path is None:
        return why_not_native(read_raw_config(place))
    read_gguf_config(GgufFile(path))
    return None


def open_source(place: Path) -> WeightSource:
    """Return the weights of a Llama-family model. Raises ConfigError."""
    path = gguf_path(place)
    return SafetensorsSource(place, read_config(place)) if path is None else GgufSource(GgufFile(path))


def load_tokenizer(place: Path) -> BytePairTokenizer:
    """Return the tokenizer: that of `tokenizer.json`, also beside a GGUF file, else of the file's metadata."""
    path = gguf_path(place)
    if path is None:
        return BytePairTokenizer.load(place)
    metadata = GgufFile(path).metadata
    if (path.parent / "tokenizer.json").exists():
        tokenizer = BytePairTokenizer.load(path.parent)
        tokenizer.eos_token_ids |= end_ids(metadata)
        return tokenizer
    try:
        return gguf_tokenizer(metadata)
    except ConfigError as error:
        raise ConfigError(f"generation.model: {path}: {error.message}") from error


def chat_template(place: Path) -> tuple[str, dict[str, str]] | None:
    """Return the chat template of a GGUF file and the special tokens by their names; None where there is none."""
    path = gguf_path(place)
    metadata = {} if path is None else GgufFile(path).metadata
    if TEMPLATE not in metadata:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return metadata[TEMPLATE], {f"{name}_token": tokens[number] for name, number in ids.items() if number is not None}


def model_hash(place: Path) -> str:
    """Return a name of the weights' content that is cheap to compute."""
    path = gguf_path(place)
    if path is None:
        return weights_hash(place)
    digest = hashlib.sha256()
    sample_file(path, digest)
    return digest.hexdigest()


def gguf_path(place: Path) -> Path | None:
    """Return the GGUF file, None for a folder in the form of transformers. Raises ConfigError for several files."""
    if place.suffix == SUFFIX and place.is_file():
        return place
    if (place / "config.json").exists():
        return None
    files = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else []
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"generation.model: {place} has several GGUF files, name one of them: {names}")
    return files[0] if files else None
