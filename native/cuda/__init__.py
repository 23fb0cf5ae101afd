"""The ops on CUDA: Triton kernels, one file per op; attention is torch's own fused kernel."""
