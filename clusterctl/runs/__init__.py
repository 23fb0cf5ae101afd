"""A run from start to end: start, watch, stop, restart, and say why it failed."""
