"""Kafka and Redis: the only place that makes their clients, and everything that depends on the log's order."""
