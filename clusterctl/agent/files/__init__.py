"""Receive, send, cache and verify folders and checkpoints on this node."""
