"""CUDA: torch's fused attention; the other ops are single kernels of torch's already."""
