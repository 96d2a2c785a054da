"""Messages and errors: what travels, in types and bytes. No I/O, no torch; imports nothing else of GEA."""
