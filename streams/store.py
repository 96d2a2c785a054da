"""Small shared state as keys and values: turns, pins, markers. Redis or Valkey is the real store.

Every call is bounded in time, and a dead server costs nothing after its first failures: the circuit breaker refuses at
once and lets one call through now and then to find it again. All operations may safely run twice. The store knows
nothing of what the values mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from schemas.errors import StoreUnavailableError
from streams.breaker import CircuitBreaker
from streams.settings import StoreSettings

# A list of items with ids in a hash and their order in a list; both keys carry the same {tag}, so that a cluster keeps
# them together. An id that is known changes nothing: a script that ran, but whose answer was lost, may run again.
APPEND = """
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[1])
while redis.call('LLEN', KEYS[2]) > tonumber(ARGV[3]) do
  redis.call('HDEL', KEYS[1], redis.call('LPOP', KEYS[2]))
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
"""
LAST = """
local ids = redis.call('LRANGE', KEYS[2], -tonumber(ARGV[1]), -1)
if #ids == 0 then return {} end
return redis.call('HMGET', KEYS[1], unpack(ids))
"""


class StateStore(Protocol):
    """Keys and values with a time to live. Every method raises StoreUnavailableError, in bounded time."""

    async def get(self, key: str) -> bytes | None:
        """Return the value, None if there is none."""
        ...

    async def set(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """Set the value."""
        ...

    async def set_if_absent(self, key: str, value: bytes, *, ttl_s: float) -> bytes:
        """Set the value unless there is one, and return the one that stands now."""
        ...

    async def delete(self, key: str) -> None:
        """Remove a value or a list."""
        ...

    async def append(self, key: str, item_id: str, item: bytes, *, max_items: int, ttl_s: float) -> bool:
        """Append an item to a list, keep the last `max_items`, renew its life; False if the id is in the list."""
        ...

    async def last(self, key: str, count: int) -> Sequence[bytes]:
        """Return the last items of a list, oldest first."""
        ...

    async def ping(self) -> None:
        """Return if the store answers."""
        ...

    async def close(self) -> None:
        """Close. Idempotent."""
        ...


class RedisStore:
    """A StateStore on Redis or Valkey. `timeout_ms` of the settings bounds every call, waiting for a connection too."""

    def __init__(
        self, settings: StoreSettings, *, breaker: CircuitBreaker | None = None, max_connections: int = 16
    ) -> None:
        self.breaker = breaker or CircuitBreaker()
        self._timeout_s = settings.timeout_ms / 1000
        self._client = redis_client(settings, settings.state_url or settings.url, max_connections)
        self._connections = asyncio.Semaphore(max_connections)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._append = self._client.register_script(APPEND)
        self._last = self._client.register_script(LAST)

    async def get(self, key: str) -> bytes | None:
        """Return the value, None if there is none."""
        value: bytes | None = await self._call(lambda: self._client.get(key))
        return value

    async def set(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """Set the value."""
        await self._call(lambda: self._client.set(key, value, px=_ms(ttl_s)))

    async def set_if_absent(self, key: str, value: bytes, *, ttl_s: float) -> bytes:
        """Set the value unless there is one, and return the one that stands now."""
        found: bytes | None = await self._call(lambda: self._client.set(key, value, px=_ms(ttl_s), nx=True, get=True))
        return value if found is None else found

    async def delete(self, key: str) -> None:
        """Remove a value or a list."""
        await self._call(lambda: self._client.unlink(*_list_keys(key)))
        await self._call(lambda: self._client.unlink(key))

    async def append(self, key: str, item_id: str, item: bytes, *, max_items: int, ttl_s: float) -> bool:
        """Append an item to a list; False if its id is in the list."""
        arguments: list[str | bytes | int] = [item_id, item, max_items, _ms(ttl_s)]
        return bool(await self._call(lambda: self._append(keys=_list_keys(key), args=arguments)))

    async def last(self, key: str, count: int) -> Sequence[bytes]:
        """Return the last items of a list, oldest first."""
        if count < 1:
            return ()
        items: list[bytes | None] = await self._call(lambda: self._last(keys=_list_keys(key), args=[count]))
        return tuple(item for item in items if item is not None)

    async def ping(self) -> None:
        """Return if the store answers."""
        await self._call(lambda: self._client.ping())

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._tasks:
            await asyncio.wait(self._tasks)  # each is bounded in time
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.aclose()
        except (RedisError, OSError, TimeoutError):
            return  # there is nothing to say goodbye to

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Run a command in a task of its own: a caller that is cancelled leaves it to give its connection back."""
        if not self.breaker.admit():
            raise StoreUnavailableError("Redis failed a moment ago and is not asked now")
        task = asyncio.create_task(self._run(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        outcome = await asyncio.shield(task)
        if isinstance(outcome, StoreUnavailableError):
            raise outcome
        return outcome

    async def _run(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Return the reply, or the error as a value: nobody may be there any more to take it."""
        try:
            async with asyncio.timeout(self._timeout_s), self._connections:
                result = await command()
        except (RedisError, OSError, TimeoutError) as error:
            self.breaker.fail()
            unavailable = StoreUnavailableError(f"Redis: {str(error) or f'no answer within {self._timeout_s:g} s'}")
            unavailable.__cause__ = error
            return unavailable
        except BaseException:
            self.breaker.give_up()
            raise
        self.breaker.succeed()
        return result


def redis_client(settings: StoreSettings, url: str, max_connections: int) -> redis.Redis:
    """Make a client whose every step is bounded by the settings' timeout; one retry, for a connection that went stale.

    Its pool refuses more than `max_connections` calls at once: the caller lets others wait. The pool of redis-py that
    lets them wait itself forgets to wake one when another is cancelled.

    User and password stand in the URL, `rediss://` means TLS.
    """
    timeout_s = settings.timeout_ms / 1000
    options: dict[str, Any] = {}
    if url.startswith("rediss://"):
        options = {
            "ssl_ca_certs": settings.tls.ca_file,
            "ssl_certfile": settings.tls.cert_file,
            "ssl_keyfile": settings.tls.key_file,
            "ssl_check_hostname": settings.tls.is_hostname_checked,
        }
    pool = redis.ConnectionPool.from_url(
        url,
        max_connections=max_connections,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 1),
        **options,
    )
    return redis.Redis.from_pool(pool)


def _list_keys(key: str) -> list[str]:
    return [f"{{{key}}}:items", f"{{{key}}}:order"]


def _ms(ttl_s: float) -> int:
    return max(1, int(ttl_s * 1000))
