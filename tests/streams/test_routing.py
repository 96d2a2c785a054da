"""Partitions of keys: known vectors of Kafka's Java client, and agreement with aiokafka."""

from __future__ import annotations

import pytest
from aiokafka.partitioner import DefaultPartitioner
from hypothesis import given
from hypothesis import strategies as st

from streams.routing import murmur2, murmur2_partition


@pytest.mark.parametrize(
    ("key", "expected"),
    [  # org.apache.kafka.common.utils.UtilsTest.testMurmur2
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_equals_the_java_client(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected % 2**32


@given(st.binary(max_size=40), st.integers(1, 128))
def test_partition_equals_aiokafka(key: bytes, num_partitions: int) -> None:
    partitions = list(range(num_partitions))
    assert murmur2_partition(key, num_partitions) == DefaultPartitioner()(key, partitions, partitions)
