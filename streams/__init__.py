"""Kafka and Redis: the only place that makes their clients, and everything that depends on the log's order.

The client for applications is here; the rest is imported from its modules.
"""

from schemas.request import Message, Role
from streams.answer import Answer, Chunk, ChunkStream, StreamPosition
from streams.client import GeaClient
from streams.client_options import ClientSettings, RequestOptions
from streams.settings import BrokerSettings, Security, Tls

__all__ = [
    "Answer",
    "BrokerSettings",
    "Chunk",
    "ChunkStream",
    "ClientSettings",
    "GeaClient",
    "Message",
    "RequestOptions",
    "Role",
    "Security",
    "StreamPosition",
    "Tls",
]
