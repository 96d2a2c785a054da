"""Tests of the worker pools."""
