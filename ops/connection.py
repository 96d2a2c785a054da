"""Where a command finds Kafka and Redis, and how it connects.

The address comes from, in this order: `--kafka`, an explicit configuration (`--config`, `GEA_CONFIG` or
`GEA_KAFKA_BOOTSTRAP`), the running stack of the given name. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import ops
from ops.errors import CommandError
from ops.stack import DEFAULT_NAME, StackFolder, StackState, running_stack
from workers.settings import Settings, load_settings

if TYPE_CHECKING:
    from streams.broker import Broker
    from streams.settings import BrokerSettings

PACKAGE = Path(ops.__file__).resolve().parent
DEV_CONFIG = PACKAGE / "config" / "dev.yaml"
BOOTSTRAP_VARIABLE = "GEA_KAFKA_BOOTSTRAP"
CONFIG_VARIABLE = "GEA_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The settings of a command, with the addresses filled in, and the stack they came from."""

    settings: Settings
    stack: StackState | None = None

    @property
    def bootstrap(self) -> str:
        """Where Kafka is."""
        return self.settings.kafka.bootstrap

    def broker(self, client_id: str = "gea-cli") -> Broker:
        """Return a broker, not yet opened."""
        from workers.connect import kafka_broker  # with aiokafka, which `gea --help` need not load

        return kafka_broker(self.settings, client_id=client_id)

    def broker_settings(self, client_id: str = "gea-cli") -> BrokerSettings:
        """Return how to reach Kafka, as `GeaClient` takes it."""
        from workers.connect import broker_settings

        return broker_settings(self.settings.kafka, client_id=client_id)


def find_connection(
    *,
    kafka: str | None = None,
    config: Path | None = None,
    name: str = DEFAULT_NAME,
    environ: Mapping[str, str],
    is_trusted: bool = False,
) -> Connection:
    """Return where the command should connect. `is_trusted`: a recorded stack counts without a look at its processes.

    Raises CommandError if neither an address is given nor a stack runs, ConfigError for a bad configuration.
    """
    config = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    is_explicit = config is not None or BOOTSTRAP_VARIABLE in environ
    stack = None if kafka or is_explicit else _stack(name, is_trusted)
    if kafka is None and not is_explicit and stack is None:
        which, other = ("No stack", "") if name == DEFAULT_NAME else (f"No stack {name!r}", f" --name {name}")
        why = f"{which} is running: start one with `gea up{other}`, or name a broker with --kafka host:port"
        raise CommandError(why)
    if stack is not None and stack.config:
        config = Path(stack.config)
    settings = load_settings(config or DEV_CONFIG, environ)
    bootstrap = kafka or (stack.bootstrap if stack else settings.kafka.bootstrap)
    redis_url = stack.redis_url if stack and stack.redis_url else settings.redis.url
    settings = msgspec.structs.replace(
        settings,
        kafka=msgspec.structs.replace(settings.kafka, bootstrap=bootstrap),
        redis=msgspec.structs.replace(settings.redis, url=redis_url),
    )
    return Connection(settings=settings, stack=stack)


def _stack(name: str, is_trusted: bool) -> StackState | None:
    if not is_trusted:
        return running_stack(name)
    state = StackFolder(name).load()
    return state if state is not None and state.is_ready else None


def config_path(config: Path | None, environ: Mapping[str, str] | None = None) -> Path:
    """Return the configuration of a stack: the given one, else `GEA_CONFIG`, else dev.yaml. Always absolute."""
    environ = os.environ if environ is None else environ
    return (config or Path(environ.get(CONFIG_VARIABLE) or DEV_CONFIG)).expanduser().absolute()
