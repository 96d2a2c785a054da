"""The generation engine behind one protocol. Importing this package loads no torch; `engine.local` does."""

from workers.generation.engine.protocol import (
    ChoiceEnd,
    Engine,
    EngineEvent,
    EngineIdentity,
    EngineRequest,
    EngineStatistics,
    EngineStream,
    Finished,
    Precision,
    SamplingParams,
    TokenChunk,
    Tokenizer,
)

__all__ = [
    "ChoiceEnd",
    "Engine",
    "EngineEvent",
    "EngineIdentity",
    "EngineRequest",
    "EngineStatistics",
    "EngineStream",
    "Finished",
    "Precision",
    "SamplingParams",
    "TokenChunk",
    "Tokenizer",
]
