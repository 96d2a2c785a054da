"""What the tests of the core share: readers that keep all events, requests of bytes, a loop that must come to rest."""

from __future__ import annotations

from tests.workers.generation.fakes import assert_at_rest
from workers.generation.engine.core import EngineCore
from workers.generation.engine.protocol import EngineEvent, EngineRequest, Finished, SamplingParams, TokenChunk

GREEDY = SamplingParams(temperature=0, max_tokens=100)


class Reader:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.events: list[EngineEvent | Exception] = []

    def text(self, index: int = 0) -> str:
        return "".join(e.text for e in self.events if isinstance(e, TokenChunk) and e.index == index)

    def token_ids(self, index: int = 0) -> tuple[int, ...]:
        chunks = [e for e in self.events if isinstance(e, TokenChunk) and e.index == index]
        return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)

    def num_tokens(self) -> int:
        return sum(len(e.token_ids) for e in self.events if isinstance(e, TokenChunk))

    @property
    def finished(self) -> Finished:
        (found,) = [event for event in self.events if isinstance(event, Finished)]
        assert found is self.events[-1]
        return found


def request(name: str = "r", prompt: str = "Hi", sampling: SamplingParams = GREEDY) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tuple(prompt.encode()), sampling=sampling)


def run(core: EngineCore, max_steps: int = 1_000) -> None:
    for _ in range(max_steps):
        if core.is_idle:
            assert_at_rest(core)
            return
        core.step()
    raise AssertionError("the engine does not come to rest")


def answer(core: EngineCore, asked: EngineRequest) -> Reader:
    reader = Reader()
    core.add(asked, reader.events.append)
    run(core)
    return reader
