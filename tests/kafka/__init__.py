"""Tests that need a real Kafka broker."""
