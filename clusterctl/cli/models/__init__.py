"""Commands about training data, checkpoints and trained models."""
