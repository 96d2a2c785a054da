"""The generation engine behind one protocol. Importing this package loads no torch; `engine.local` does."""

from workers.generation.engine.protocol import (
    ChoiceEnd,
    ConstraintKind,
    ConstraintSpec,
    Engine,
    EngineEvent,
    EngineIdentity,
    EngineRequest,
    EngineStream,
    Finished,
    KVPrecision,
    Precision,
    SamplingParams,
    TokenChunk,
    Tokenizer,
)
from workers.generation.engine.statistics import EngineStatistics

__all__ = [
    "ChoiceEnd",
    "ConstraintKind",
    "ConstraintSpec",
    "Engine",
    "EngineEvent",
    "EngineIdentity",
    "EngineRequest",
    "EngineStatistics",
    "EngineStream",
    "Finished",
    "KVPrecision",
    "Precision",
    "SamplingParams",
    "TokenChunk",
    "Tokenizer",
]
