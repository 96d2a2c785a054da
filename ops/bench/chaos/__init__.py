"""The chaos bench: load on a real stack while its parts die, and a checker that reads the whole log afterwards."""
