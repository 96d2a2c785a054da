"""`python -m ops.embedded kafka|models|broker`: put the parts into the cache, with progress on stderr.

`broker` prints which broker would run (`kafka` or `tansu`) on stdout and the reason on stderr.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Sequence

from ops.embedded.broker import choose_broker
from ops.embedded.errors import EmbeddedError
from ops.embedded.jars import Say
from ops.embedded.kafka import prepare
from ops.embedded.models import encoder_folder, language_model_folder

USAGE = "usage: python -m ops.embedded kafka|models|broker"


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 done, 1 failed with one line on stderr, 2 wrong usage, 130 interrupted."""
    steps = {"kafka": _kafka, "models": _models, "broker": _broker}
    if len(arguments) != 1 or arguments[0] not in steps:
        print(USAGE, file=sys.stderr)
        return 2
    say = functools.partial(_say, arguments[0])
    try:
        steps[arguments[0]](say)
    except (EmbeddedError, OSError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _kafka(say: Say) -> None:
    started = time.monotonic()
    jars = asyncio.run(prepare(say=say))
    say(f"Apache Kafka {jars.version} is ready ({time.monotonic() - started:.1f} s)")


def _models(say: Say) -> None:
    started = time.monotonic()
    encoder_folder()
    language_model_folder(say=say)
    say(f"language model and encoder are ready ({time.monotonic() - started:.1f} s)")


def _broker(say: Say) -> None:
    choice = choose_broker()
    say(choice.reason)
    print(choice.kind)


def _say(part: str, text: str) -> None:
    print(f"    {part}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
