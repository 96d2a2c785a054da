"""Tests of the router pool."""
