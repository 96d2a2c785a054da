"""What the first and the second signal do."""

from __future__ import annotations

from workers.stop_signals import SAME_S, StopSignals


def test_the_first_signal_drains_and_a_later_one_ends_at_once() -> None:
    now, done = 10.0, []
    signals = StopSignals(lambda: done.append("drain"), lambda: done.append("end"), clock=lambda: now)
    signals.take()
    assert done == ["drain"]
    now += SAME_S / 2
    signals.take()
    assert done == ["drain"], "the terminal and the parent both send one"
    now += SAME_S
    signals.take()
    assert done == ["drain", "end"]
