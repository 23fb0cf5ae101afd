"""Ranks as groups: the exchanges of tensor, sequence and pipeline parallelism."""
