"""Ascend: attention and the update of weights by CANN's fused kernels; the reference serves the rest."""
