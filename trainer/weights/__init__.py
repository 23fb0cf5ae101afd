"""Import and export of weights: other programs' checkpoints to ours and back, one file per format."""
