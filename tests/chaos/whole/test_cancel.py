"""A long generation of the real model is cancelled by the operator's command, on real parts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from schemas.request import Retrieval, Strategy
from schemas.tokens import EndStatus, FinishReason, Kind
from streams.client import ClientSettings, GeaClient
from streams.kafka import KafkaBroker
from tests.chaos.whole.conftest import WholeStack
from tests.chaos.whole.stack_records import LONG, records_of
from tests.chaos.whole.stack_records import broker as broker

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.redis,
    pytest.mark.model,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
SOON_S = 2.0  # a record through Kafka, a step of the engine, and a record back; busy cores included
MAX_TOKENS = 500


async def test_the_command_stops_a_long_answer_in_mid_stream(stack: WholeStack, broker: KafkaBroker) -> None:
    async with GeaClient(broker, ClientSettings(timeout_s=120)) as client:
        stream = client.generate(
            LONG,
            strategy=Strategy.DIALOGUE,
            retrieval=Retrieval.OFF,
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            repetition_penalty=1.3,
        )
        async with stream:
            await anext(stream)
            told = await asyncio.to_thread(stack.json, "cancel", stream.request_id, "--reason", "seen enough")
            sent_at = time.monotonic()
            answer = await stream.answer()
            took_s = time.monotonic() - sent_at
        again = await client.replay(stream.request_id, position=answer.position).answer()
        other = await client.complete("When are you open on Sunday?")
    assert told == {"request_id": stream.request_id, "tenant": "default", "reason": "seen enough", "is_sent": True}
    assert (answer.end.status, answer.end.finish_reason) == (EndStatus.CANCELLED, FinishReason.ABORT)
    assert answer.end.failure is not None
    assert answer.end.failure.message == "seen enough"
    assert took_s < SOON_S
    assert 0 < answer.end.usage.completion_tokens < MAX_TOKENS
    assert (again.text, again.end) == (answer.text, answer.end)
    records = await records_of(broker, stream.request_id, answer.position.partition)
    assert [record.kind for record in records].count(Kind.END) == 1
    assert answer.end.usage.completion_tokens == sum(len(record.token_ids) for record in records)
    assert other.end.status is EndStatus.COMPLETED


def test_ctrl_c_of_a_question_cancels_it(stack: WholeStack) -> None:
    command = [sys.executable, "-m", "ops.cli", "ask", LONG, "--strategy", "dialogue", "--retrieval", "off"]
    asking = subprocess.Popen(
        [*command, "--max-tokens", str(MAX_TOKENS), "--json"],
        env=stack.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert asking.stderr is not None
    try:
        assert asking.stderr.read(1)  # the answer has begun
        os.kill(asking.pid, signal.SIGINT)
        out, _ = asking.communicate(timeout=30)
    finally:
        asking.kill()
        asking.wait()
    assert asking.returncode == 130
    assert '"status": "cancelled"' in out


def read_and_die(stack: WholeStack) -> None:
    """Ask in a process of its own, and kill it once it has text."""
    command = [sys.executable, "-c", READER, stack.state.bootstrap]
    with subprocess.Popen(command, env=stack.environ, stdout=subprocess.PIPE, text=True) as reading:
        try:
            assert reading.stdout is not None
            assert reading.stdout.readline()
        finally:
            reading.kill()


async def test_a_request_whose_reader_was_killed_is_given_up_after_its_lease(
    stack: WholeStack, broker: KafkaBroker
) -> None:
    await asyncio.to_thread(read_and_die, stack)
    async with GeaClient(broker) as client:
        answer = await client.replay("left-alone", timeout_s=60).answer()
    assert answer.end.status is EndStatus.CANCELLED
    assert answer.end.failure is not None
    assert answer.end.failure.message == "reader is gone"


READER = """
import asyncio, sys
from streams import GeaClient
from schemas.request import Retrieval, Strategy

async def main():
    async with GeaClient(sys.argv[1]) as client:
        stream = client.generate(
            "Tell me a long story about a mountain, a river and a bridge.", request_id="left-alone", reader_lease_s=2,
            strategy=Strategy.DIALOGUE, retrieval=Retrieval.OFF, max_tokens=500, temperature=0.0,
            repetition_penalty=1.3,
        )
        async for chunk in stream:
            print(chunk.text, flush=True)

asyncio.run(main())
"""
