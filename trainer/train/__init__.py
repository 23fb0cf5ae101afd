"""The training loop and its observers."""
