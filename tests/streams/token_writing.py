"""Writers of the token log of a broker in memory, and what readers see of it."""

from __future__ import annotations

from schemas.tokens import Claim, Epoch
from streams.claims import StreamView
from streams.memory import MemoryBroker
from streams.token_reader import read_view
from streams.token_writer import TokenWriter, WriterLimits
from streams.topics import TOKENS
from tests.streams.token_fakes import REPLY

EPOCH = Epoch(0, 3)
PATIENT = WriterLimits(max_tokens=4, max_delay_ms=10_000)


async def writer_on(broker: MemoryBroker, limits: WriterLimits = PATIENT, epoch: Epoch = EPOCH) -> TokenWriter:
    return TokenWriter(await broker.producer(), REPLY, "r1", epoch=epoch, claim=Claim(model="m"), limits=limits)


async def view_of(broker: MemoryBroker) -> StreamView:
    return await read_view(broker, REPLY, "r1", until=len(broker.records(TOKENS)), timeout_s=1)
