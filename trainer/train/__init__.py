"""The training loop, and who watches it."""
