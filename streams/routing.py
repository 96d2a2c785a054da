"""Which partition a key belongs to, as every Kafka client decides it.

`murmur2` is Kafka's variant with its fixed seed (org.apache.kafka.common.utils.Utils.murmur2); the sign bit is cleared,
then the number of partitions divides. Both brokers use this module, so that a key stands in the same partition in both.
"""

from __future__ import annotations

_SEED = 0x9747B28C
_M = 0x5BD1E995
_R = 24
_MASK = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """Return Kafka's 32-bit MurmurHash2 of `key`, unsigned."""
    whole = len(key) & ~3
    value = _SEED ^ len(key)
    for start in range(0, whole, 4):
        k = int.from_bytes(key[start : start + 4], "little") * _M & _MASK
        k = (k ^ k >> _R) * _M & _MASK
        value = value * _M & _MASK ^ k
    if whole < len(key):
        value = (value ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    value = (value ^ value >> 13) * _M & _MASK
    return value ^ value >> 15


def murmur2_partition(key: bytes, num_partitions: int) -> int:
    """Return the partition of `key` among `num_partitions`, equal to Kafka's Java client and aiokafka."""
    return (murmur2(key) & 0x7FFFFFFF) % num_partitions
