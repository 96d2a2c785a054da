"""The door: validates, admits, recognises repeats, stamps and forwards requests."""
