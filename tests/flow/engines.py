"""Scripted engines that cannot go on with the text of another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.generation.engine import EngineIdentity, EngineRequest
from workers.generation.engine.fake import FakeEngine


class OtherWeights(FakeEngine):
    @property
    def identity(self) -> EngineIdentity:
        return replace(super().identity, weights_hash="1" * 64)


class OtherBackend(FakeEngine):
    """Runs the same weights by other kernels."""

    @property
    def identity(self) -> EngineIdentity:
        return replace(super().identity, engine="native-cpu")


class Forgetful(FakeEngine):
    """Draws its own tokens whatever it is given."""

    def submit(self, request: EngineRequest) -> Any:
        return super().submit(replace(request, output=()))


class Brief(Forgetful):
    """Draws two tokens."""

    def submit(self, request: EngineRequest) -> Any:
        return super().submit(replace(request, sampling=replace(request.sampling, max_tokens=2)))
