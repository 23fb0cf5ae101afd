"""Checkpoints of a run, wherever their files are: found, verified, compared, fetched, copied and pruned."""
