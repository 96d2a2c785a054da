"""Tests mirror the four packages; `flow/` runs the whole path in memory, `kafka/` on a real broker."""
