"""The ops on CUDA: torch's fused attention; torch already has a single kernel for each of the other ops."""
