"""Real parts are killed and cut; short enough for every run of the whole suite."""
