"""Tests of the retrieval pool."""
