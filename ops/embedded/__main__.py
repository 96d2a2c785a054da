"""`python -m ops.embedded PART…`: make the parts ready, with progress on stderr.

`kafka` fetches the jars into the cache, `models` converts the language model there; both are silent where nothing is
left to do. `broker` prints which broker would run (`kafka` or `tansu`) on stdout and the reason on stderr.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ops.embedded.broker import choose_broker
from ops.embedded.cache import Say
from ops.embedded.errors import EmbeddedError
from ops.embedded.kafka import prepare
from ops.embedded.models import encoder_folder, language_model_folder

WORTH_SAYING_S = 1.0
USAGE = "usage: python -m ops.embedded kafka|models|broker…"


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 done, 1 a part failed (one line on stderr), 2 wrong usage, 130 interrupted.

    A part that fails does not keep the later ones from being made.
    """
    parts = {"kafka": _kafka, "models": _models, "broker": _broker}
    if not arguments or not parts.keys() >= set(arguments):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        made = [_make(parts[name], functools.partial(_say, name)) for name in arguments]
    except KeyboardInterrupt:
        return 130
    return 0 if all(made) else 1


def _make(part: Callable[[Say], None], say: Say) -> bool:
    try:
        part(say)
    except (EmbeddedError, OSError) as error:
        say(str(error))
        return False
    return True


def _kafka(say: Say) -> None:
    with _ready(say, "Apache Kafka is ready"):
        asyncio.run(prepare(say=say))


def _models(say: Say) -> None:
    with _ready(say, "language model and encoder are ready"):
        encoder_folder()
        language_model_folder(say=say)


@contextmanager
def _ready(say: Say, text: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    if (elapsed := time.monotonic() - started) > WORTH_SAYING_S:
        say(f"{text} ({elapsed:.1f} s)")


def _broker(say: Say) -> None:
    choice = choose_broker()
    say(choice.reason)
    print(choice.kind)


def _say(part: str, text: str) -> None:
    print(f"    {part}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
