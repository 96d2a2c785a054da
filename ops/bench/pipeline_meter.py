"""What the pipeline bench reads off while others work: how much stands in a log, and the CPU time of processes.

The log is asked only for its ends, so that looking on costs nothing.
"""

from __future__ import annotations

import psutil

from streams.broker import LogReader


async def num_written(reader: LogReader) -> int:
    """Return the sum of the end offsets of what is read."""
    return sum((await reader.end_offsets()).values())


def cpu_s(*processes: psutil.Process) -> float:
    """Return the CPU time of processes so far, in user and kernel mode."""
    return sum(float(times.user + times.system) for times in (process.cpu_times() for process in processes))
