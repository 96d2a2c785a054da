"""Benches: they start what they measure, print their conditions, and stop everything they started."""
