"""The intent pool's stage: requests in, the same requests with an intent out.

Everything heavy happens on one thread of its own, so the event loop never waits for a model. A client's own words
win over the model's: a fixed `intent`, `language` or `retrieval` is kept as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import yaml

from schemas.envelope import RoutedRequest
from schemas.errors import ConfigError, GeaError, InternalError, UnavailableError
from schemas.intent import IntentResult
from schemas.request import GenerationRequest, Retrieval
from schemas.worker import Pool
from streams.clock import now_ms
from workers.encoder import Encoder
from workers.intent.classifier import IntentClassifier
from workers.intent.complexity import complexity
from workers.intent.head import OUT_OF_SCOPE
from workers.intent.language import resolve_language
from workers.stage import StageSnapshot

REQUEST_MODEL = "request"

_WARM_UP = ("How long do I have to return shoes?", "鞋子多少天内可以退货？")


class IntentStage:
    """Implements `workers.stage.Annotator`. `head` None takes the weights that ship with GEA."""

    def __init__(
        self,
        encoder: Path,
        head: Path | None = None,
        *,
        intents: Path | Mapping[str, bool] | None = None,
        threads: int | None = None,
        classifier: IntentClassifier | None = None,
    ) -> None:
        """Read nothing yet; `start` does. A given `classifier` is used instead of loading one.

        `intents` says which intents need retrieval, as a map or as the file of `load_needs_retrieval`; any other
        intent does.
        """
        self._encoder_folder, self._head_folder, self._threads = encoder, head, threads
        self._intents = intents
        self._needs_retrieval: Mapping[str, bool] = {}
        self._classifier = classifier
        self._encoder: Encoder | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._num_queued = 0
        self._step_ms = 0.0
        self._last_step_ms = 0

    @property
    def pool(self) -> Pool:
        """Return the pool that this stage works in."""
        return Pool.INTENT

    async def start(self) -> None:
        """Load and warm the model. Raises ConfigError for files that are missing or don't fit."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="intent")
            await asyncio.get_running_loop().run_in_executor(self._executor, self._load)

    async def annotate(self, batch: Sequence[RoutedRequest]) -> Sequence[RoutedRequest]:
        """Return the requests in order, each with its intent. Safe to cancel: the thread finishes its batch."""
        if self._executor is None:
            raise UnavailableError("the intent stage is not started")
        self._num_queued += len(batch)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._annotate, tuple(batch))
        finally:
            self._num_queued -= len(batch)

    def give_up(self, routed: RoutedRequest, error: Exception) -> RoutedRequest:
        """Return the request as out of scope, with the error's code; passages are then looked up, to be safe."""
        text = routed.request.last_user_text()
        return _with_intent(
            routed,
            IntentResult(
                intent=OUT_OF_SCOPE,
                confidence=0.0,
                complexity=complexity(text),
                language=resolve_language(routed.request.language, text),
                failure=error.code if isinstance(error, GeaError) else InternalError.code,
            ),
        )

    def snapshot(self) -> StageSnapshot:
        """Return model, requests waiting or running, and the time of the last batch."""
        return StageSnapshot(
            model=self._classifier.model if self._classifier else "",
            num_queued=self._num_queued,
            step_ms=self._step_ms,
            last_step_ms=self._last_step_ms,
        )

    async def stop(self) -> None:
        """Finish the running batch and free the model. Idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown, wait=True, cancel_futures=True)
        if self._encoder is not None:
            self._encoder.close()
            self._encoder, self._classifier = None, None

    def _load(self) -> None:
        intents = self._intents
        self._needs_retrieval = load_needs_retrieval(intents) if isinstance(intents, Path) else dict(intents or {})
        if self._classifier is None:
            self._encoder = Encoder(self._encoder_folder, threads=self._threads)
            self._classifier = IntentClassifier.load(self._encoder, self._head_folder)
        for text in _WARM_UP:
            self._classifier.classify([text])

    def _annotate(self, batch: Sequence[RoutedRequest]) -> Sequence[RoutedRequest]:
        started = time.perf_counter()
        asked = [routed.request for routed in batch if routed.request.intent is None]
        found = iter(self._classify(asked))
        results = [
            next(found) if routed.request.intent is None else _stated(routed.request, routed.request.intent)
            for routed in batch
        ]
        annotated = [
            _with_intent(
                routed,
                msgspec.structs.replace(result, needs_retrieval=self._needs_retrieval.get(result.intent, True)),
            )
            for routed, result in zip(batch, results, strict=True)
        ]
        self._step_ms = (time.perf_counter() - started) * 1000
        self._last_step_ms = now_ms()
        return annotated

    def _classify(self, requests: Sequence[GenerationRequest]) -> Sequence[IntentResult]:
        assert self._classifier is not None
        return self._classifier.classify(
            [request.last_user_text() for request in requests], [request.language for request in requests]
        )


def load_needs_retrieval(path: Path) -> dict[str, bool]:
    """Read which intents need retrieval from YAML: `intent: {needs_retrieval: true, …}`. Raises ConfigError."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"intent.intents: {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"intent.intents: {path}: a map of intents is expected")
    for intent, described in found.items():
        if not isinstance(described, dict) or not isinstance(described.get("needs_retrieval"), bool):
            raise ConfigError(f"intent.intents: {path}: {intent}.needs_retrieval must be true or false")
    return {str(intent): described["needs_retrieval"] for intent, described in found.items()}


def _stated(request: GenerationRequest, intent: str) -> IntentResult:
    text = request.last_user_text()
    return IntentResult(
        intent=intent,
        confidence=1.0,
        complexity=complexity(text),
        language=resolve_language(request.language, text),
        model=REQUEST_MODEL,
    )


def _with_intent(routed: RoutedRequest, result: IntentResult) -> RoutedRequest:
    """Return the request with its intent; `retrieval: on` and `off` have the last word."""
    if routed.request.retrieval is not Retrieval.AUTO:
        is_on = routed.request.retrieval is Retrieval.ON
        result = msgspec.structs.replace(result, needs_retrieval=is_on)
    return msgspec.structs.replace(routed, intent=result)
