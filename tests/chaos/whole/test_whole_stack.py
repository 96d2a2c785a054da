"""The whole path on real parts, while parts of it die. The tests run in order and share one stack."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import msgpack
import pytest

from schemas.errors import BrokerUnavailableError, InvalidRequestError, RequestFailedError, ResponseTimeoutError
from schemas.request import Retrieval, Strategy
from schemas.tokens import EndStatus, Kind
from streams.broker import TopicPartition
from streams.client import ClientSettings, GeaClient
from streams.kafka import KafkaBroker
from streams.topics import DEAD_LETTER, REQUESTS
from tests.chaos.whole.conftest import ROOT, WholeStack
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


def snippets() -> dict[str, str]:
    """Return the Python examples of the README by their heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"### ([^\n]+)\n\n```python\n(.*?)```", text, flags=re.DOTALL))


@pytest.mark.parametrize("heading", ["Python client", "Any Kafka client: aiokafka and msgpack"])
def test_the_readmes_examples_work_as_they_stand(stack: WholeStack, tmp_path: Path, heading: str) -> None:
    script = tmp_path / "example.py"
    code = textwrap.dedent(snippets()[heading])
    assert "127.0.0.1:9092" in code
    script.write_text(code.replace("127.0.0.1:9092", stack.state.bootstrap), encoding="utf-8")
    answer = subprocess.run(
        [sys.executable, str(script)], env=stack.environ, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    assert "30 days" in answer.stdout
    assert "completed" in answer.stdout


async def test_bad_bytes_on_real_kafka_are_dead_lettered_and_block_nobody(broker: KafkaBroker) -> None:
    bad = {
        "bad-bytes": (b"\xc1\xff", "undecodable"),
        "no-bytes": (b"", "undecodable"),
        "too-many-bytes": (msgpack.packb({"prompt": "x" * 1_000_000}), "invalid_request"),
    }
    producer = await broker.producer()
    try:
        for request_id, (value, _) in bad.items():
            await producer.send(REQUESTS, value, key=b"k", headers=(("request_id", request_id.encode()),))
    finally:
        await producer.close()
    async with GeaClient(broker) as client:
        for request_id, (_, failure_code) in bad.items():
            with pytest.raises(RequestFailedError) as caught:
                await client.replay(request_id).answer()
            assert caught.value.failure_code == failure_code
        with pytest.raises(InvalidRequestError, match="at most"):
            await client.complete("x" * 1_000_000)
        answer = await client.complete("When are you open on Sunday?")
    assert answer.end.status is EndStatus.COMPLETED
    places = {TopicPartition(DEAD_LETTER, number): 0 for number in range(await broker.partitions(DEAD_LETTER))}
    reader = await broker.reader(dict(places))
    try:
        assert sum((await reader.end_offsets()).values()) >= 2
    finally:
        await reader.close()


async def test_a_session_is_remembered_in_redis(broker: KafkaBroker) -> None:
    async with GeaClient(broker) as client:
        for prompt in ("My favourite colour is ultramarine.", "What did I say?"):
            answer = await client.complete(
                prompt,
                session_id="painter",
                strategy=Strategy.DIALOGUE,
                retrieval=Retrieval.OFF,
                max_tokens=12,
                explain=True,
            )
    assert answer.end.explanation is not None
    assert "ultramarine" in answer.end.explanation.prompt


async def test_many_requests_at_once_all_end_and_share_the_engine(broker: KafkaBroker) -> None:
    async with GeaClient(broker) as client:
        answers = await asyncio.gather(
            *(
                client.complete(f"Count to {n}.", strategy=Strategy.DIALOGUE, retrieval=Retrieval.OFF, max_tokens=16)
                for n in range(12)
            )
        )
    assert {answer.end.status for answer in answers} <= {EndStatus.COMPLETED, EndStatus.INCOMPLETE}
    assert all(answer.end.usage.completion_tokens <= 16 for answer in answers)


async def test_a_killed_generation_worker_is_followed_by_another_with_one_effective_end(
    stack: WholeStack, broker: KafkaBroker
) -> None:
    async with GeaClient(broker) as client:
        stream = client.generate(
            LONG,
            deadline_s=240,  # the second worker loads its model meanwhile, on cores that may be busy
            strategy=Strategy.DIALOGUE,
            retrieval=Retrieval.OFF,
            max_tokens=150,
            temperature=0.0,
            repetition_penalty=1.3,
        )
        async with stream:
            num_tokens = 0
            async for chunk in stream:
                num_tokens += len(chunk.token_ids)
                if num_tokens > 8:
                    break
            assert stream.position is not None
            stack.kill("generation-1")
            stack.start_worker("generation", "generation-2")
            answer = await stream.answer()
        position = stream.position
        again = await client.replay(answer.request_id, position=position).answer()
    assert answer.end.status in (EndStatus.COMPLETED, EndStatus.INCOMPLETE)
    assert (again.text, again.end) == (answer.text, answer.end)
    records = await records_of(broker, answer.request_id, position.partition)
    claims = [record for record in records if record.claim is not None]
    assert len(claims) >= 2
    assert claims[0].epoch < claims[-1].epoch
    assert [record.kind for record in records].count(Kind.END) == 1


async def test_without_workers_the_answer_waits_in_the_log(stack: WholeStack, broker: KafkaBroker) -> None:
    stack.kill("intent-1")
    async with GeaClient(broker, ClientSettings(timeout_s=1)) as client:
        with pytest.raises(ResponseTimeoutError, match="replayed") as caught:
            await client.complete("How many days do I have to return shoes?")
        stack.start_worker("intent", "intent-2")
        answer = await client.replay(caught.value.request_id, timeout_s=120).answer()
    assert "30 days" in answer.text


async def test_without_redis_answers_go_on_without_memory(stack: WholeStack, broker: KafkaBroker) -> None:
    stack.kill("redis")
    async with GeaClient(broker) as client:
        for _ in range(2):
            answer = await client.complete("How many days do I have to return shoes?", session_id="forgetful")
            assert "30 days" in answer.text


async def test_without_kafka_every_call_ends_in_bounded_time_with_its_reason(stack: WholeStack) -> None:
    bootstrap = stack.state.bootstrap
    stack.kill("kafka")
    async with GeaClient(bootstrap, ClientSettings(connect_s=2)) as client:
        async with asyncio.timeout(30):
            with pytest.raises(BrokerUnavailableError, match=re.escape(bootstrap)):
                await client.complete("hello")
    health = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "ops.healthcheck", "--kafka", bootstrap],
        env=stack.environ,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert health.returncode == 1
    assert len(health.stdout.splitlines() + health.stderr.splitlines()) == 1
