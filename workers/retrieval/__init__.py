"""Retrieval: documents of a topic in two channels, by meaning and by word, fused into the passages of a request."""
