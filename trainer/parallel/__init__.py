"""Groups of ranks, and the exchanges of tensor, sequence and pipeline parallelism."""
