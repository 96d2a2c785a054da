"""Tests of `streams`."""
