"""Checkpoints: the format on disk, saving, loading, and how many are kept."""
