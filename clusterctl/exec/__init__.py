"""Run one command on many nodes and format its output."""
