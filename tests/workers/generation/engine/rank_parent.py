"""A process that runs a tensor-parallel model of two ranks and is then left alone: `… FOLDER`.

It writes the number of the other rank's process, and ends without closing anything when its input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.workers.generation.engine.rank_plans import make_plan
from workers.generation.engine.tensor_parallel import TensorParallelRunner


def main() -> None:
    """Start the ranks, say so, wait."""
    runner = TensorParallelRunner(make_plan(Path(sys.argv[1])), vocab_size=128, identity="tiny")
    sys.stdout.write(f"{runner.pids[0]}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
