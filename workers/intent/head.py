"""The trained head: a linear map from features to intents, with what turns its numbers into a decision.

Kept as two files in a folder: `head.safetensors` (float16) and `head.json` (labels, calibration, provenance).
A head only fits the encoder and the feature layout that it was trained on; anything else is refused at load.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from schemas.errors import ConfigError
from workers.intent.features import LAYOUT, NUM_BUCKETS, Matrix, SentenceEncoder

OUT_OF_SCOPE = "out_of_scope"
DEFAULT_FOLDER = Path(__file__).parent / "weights"

_WEIGHTS_FILE = "head.safetensors"
_METADATA_FILE = "head.json"
_MAX_WEIGHTS_BYTES = 64 * 1024 * 1024


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How scores of one language become a decision; fitted on predictions of texts that were not trained on.

    Below `min_confidence` (probability of the best intent) or `min_similarity` (cosine to the nearest centroid) a
    text is out of scope.
    """

    temperature: float = 1.0
    min_confidence: float = 0.0
    min_similarity: float = -1.0


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a head comes from. `metrics` are those of the training report."""

    dataset: str
    dataset_sha256: str
    glossary_sha256: str
    num_rows: int
    seed: int
    l2: float
    trained_on: str
    command: str
    metrics: dict[str, object] = {}


class HeadMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands beside the weights. Row i of the weights is label i."""

    labels: tuple[str, ...]
    calibration: dict[str, Calibration]
    """By language of the script; a text in any other language is out of scope."""
    encoder: str
    dimension: int
    layout: str = LAYOUT
    num_buckets: int = NUM_BUCKETS
    weights_sha256: str = ""
    provenance: Provenance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Weights (K, F), bias (K,) and class centroids (C, F), all float32; F = dimension + buckets."""

    weight: Matrix
    bias: Matrix
    centroids: Matrix
    metadata: HeadMetadata

    @property
    def name(self) -> str:
        """Return name and hash of the weights."""
        return f"intent-head@{self.metadata.weights_sha256[:12]}"

    def with_provenance(self, provenance: Provenance) -> Head:
        """Return the same head, with where it comes from."""
        return replace(self, metadata=msgspec.structs.replace(self.metadata, provenance=provenance))

    def logits(self, features: Matrix) -> Matrix:
        """Return the scores of (N, F) features before any temperature: (N, K)."""
        scores: Matrix = features @ self.weight.T + self.bias
        return scores

    def similarity(self, features: Matrix) -> Matrix:
        """Return the cosine of each row of (N, F) to the centroid nearest to it: (N,)."""
        return nearest_similarity(features, self.centroids)


def nearest_similarity(features: Matrix, centroids: Matrix) -> Matrix:
    """Return the greatest cosine of each row of (N, F) to any of (C, F) unit centroids: (N,)."""
    lengths = np.linalg.norm(features, axis=1)
    nearest: Matrix = (features @ centroids.T).max(axis=1) / np.maximum(lengths, 1e-9)
    return nearest


def save_head(head: Head, folder: Path) -> Head:
    """Write both files; the returned head is what `load_head` will read. Blocking."""
    tensors = {"weight": head.weight, "bias": head.bias, "centroids": head.centroids}
    raw = save_tensors({name: tensor.astype(np.float16) for name, tensor in tensors.items()})
    metadata = msgspec.structs.replace(head.metadata, weights_sha256=hashlib.sha256(raw).hexdigest())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _WEIGHTS_FILE).write_bytes(raw)
    (folder / _METADATA_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(metadata), indent=2) + b"\n")
    return _head(raw, metadata)


def load_head(folder: Path, encoder: SentenceEncoder) -> Head:
    """Read a head and check that it is whole and fits `encoder`. Blocking; raises ConfigError."""
    try:
        raw = (folder / _WEIGHTS_FILE).read_bytes()
        metadata = msgspec.json.decode((folder / _METADATA_FILE).read_bytes(), type=HeadMetadata)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"intent.head: {folder}: {error}") from error
    _check_fit(metadata, folder, encoder)
    if len(raw) > _MAX_WEIGHTS_BYTES or hashlib.sha256(raw).hexdigest() != metadata.weights_sha256:
        raise ConfigError(f"intent.head: {folder / _WEIGHTS_FILE} is not the file that {_METADATA_FILE} describes")
    try:
        head = _head(raw, metadata)
    except (SafetensorError, KeyError) as error:
        raise ConfigError(f"intent.head: {folder / _WEIGHTS_FILE}: {error}") from error
    num_labels, width = len(metadata.labels), metadata.dimension + metadata.num_buckets
    if (head.weight.shape, head.bias.shape) != ((num_labels, width), (num_labels,)) or head.centroids.shape[1:] != (
        width,
    ):
        raise ConfigError(f"intent.head: {folder}: the weights do not have the shape of {num_labels} x {width}")
    return head


def _head(raw: bytes, metadata: HeadMetadata) -> Head:
    tensors = {name: tensor.astype(np.float32) for name, tensor in load_tensors(raw).items()}
    return Head(weight=tensors["weight"], bias=tensors["bias"], centroids=tensors["centroids"], metadata=metadata)


def _check_fit(metadata: HeadMetadata, folder: Path, encoder: SentenceEncoder) -> None:
    # The name of an encoder changes with its folder; its weights are what the head was trained on.
    if metadata.encoder.rpartition("@")[2] != encoder.identity.rpartition("@")[2]:
        raise ConfigError(
            f"intent.head: {folder} was trained on encoder {metadata.encoder}, this one is {encoder.identity};"
            " train it again: gea train intent"
        )
    found = (metadata.layout, metadata.dimension, metadata.num_buckets)
    if found != (LAYOUT, encoder.dimension, NUM_BUCKETS):
        raise ConfigError(
            f"intent.head: {folder} has the layout {found}, expected {(LAYOUT, encoder.dimension, NUM_BUCKETS)};"
            " train it again: gea train intent"
        )
