"""Weights in and out: other programs' checkpoints to ours and back, one file for each format."""
