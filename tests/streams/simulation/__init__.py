"""A small model of the claims protocol, explored exhaustively: the rules of `streams` decide, faults come at will."""
