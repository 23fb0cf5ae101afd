"""Runs: start, watch, restart and stop them, and find why they failed."""
