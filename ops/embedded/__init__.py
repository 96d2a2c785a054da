"""Kafka, Redis and the models as the demo, `gea up` and the tests run them: real, local, and set up by themselves.

Importing this package loads no torch and no transformers, and starts nothing.
"""

from __future__ import annotations

from ops.embedded.broker import BrokerKind, KafkaChoice, choose_broker, make_broker
from ops.embedded.cache import cache_folder
from ops.embedded.errors import EmbeddedError, MissingPrerequisiteError, PreparationError, ServerError
from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.models import encoder_folder, language_model_folder
from ops.embedded.process import ServerHandle, is_running, stop
from ops.embedded.redis import EmbeddedRedis
from ops.embedded.tansu import EmbeddedTansu

__all__ = [
    "BrokerKind",
    "EmbeddedError",
    "EmbeddedKafka",
    "EmbeddedRedis",
    "EmbeddedTansu",
    "KafkaChoice",
    "MissingPrerequisiteError",
    "PreparationError",
    "ServerError",
    "ServerHandle",
    "cache_folder",
    "choose_broker",
    "encoder_folder",
    "is_running",
    "language_model_folder",
    "make_broker",
    "stop",
]
