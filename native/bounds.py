"""How far a backend may be from the reference: the largest error of the value and of the gradients of each op.

An error is the largest difference divided by the largest absolute value expected, so that it means the same for losses
and gradients. Expected is the result of the reference in fp64 on the same, already rounded, inputs.
"""

from __future__ import annotations

import torch

FP32, BF16 = torch.float32, torch.bfloat16
# (op, type) -> allowed error of the value and of the gradients. One rounding to bf16 is an error of 2^-9 = 0.002; sums
# of rounded products and a second rounding add to it.
ERRORS = {
    ("layer_norm", FP32): (2e-6, 2e-6),
    ("layer_norm", BF16): (4e-3, 4e-3),
    ("rms_norm", FP32): (2e-6, 2e-6),
    ("rms_norm", BF16): (4e-3, 4e-3),
    ("add_layer_norm", FP32): (2e-6, 2e-6),
    # The sum is rounded before its norm is computed.
    ("add_layer_norm", BF16): (8e-3, 8e-3),
    ("add_rms_norm", FP32): (2e-6, 2e-6),
    ("add_rms_norm", BF16): (8e-3, 8e-3),
    # The slope takes an error of the logistic function, at most 2e-7, up to 12 times.
    ("gelu", FP32): (1e-6, 4e-6),
    ("gelu", BF16): (4e-3, 8e-3),
    ("bias_gelu", FP32): (1e-6, 4e-6),
    # torch rounds the sum too.
    ("bias_gelu", BF16): (8e-3, 1.2e-2),
    ("swiglu", FP32): (1e-6, 1e-6),
    # torch rounds silu(gate) too.
    ("swiglu", BF16): (8e-3, 8e-3),
    ("dropout_add", FP32): (1e-6, 2e-6),
    ("dropout_add", BF16): (4e-3, 4e-3),
    ("rotary", FP32): (1e-6, 1e-6),
    # torch rounds cosines, sines and products too.
    ("rotary", BF16): (1.2e-2, 1.2e-2),
    ("cross_entropy", FP32): (1e-6, 2e-6),
    # The loss is fp32 in both backends; the gradient is rounded twice.
    ("cross_entropy", BF16): (1e-6, 6e-3),
    ("linear_cross_entropy", FP32): (1e-6, 4e-6),
    # The logits are rounded.
    ("linear_cross_entropy", BF16): (4e-3, 2e-2),
    ("vocabulary_cross_entropy", FP32): (1e-6, 4e-6),
    ("vocabulary_cross_entropy", BF16): (1e-6, 6e-3),
    ("embedding", FP32): (0.0, 1e-6),
    ("embedding", BF16): (0.0, 4e-3),
    ("route", FP32): (1e-6, 6e-6),
    ("route", BF16): (1e-6, 4e-3),
    ("linear", FP32): (2e-6, 4e-6),
    ("linear", BF16): (4e-3, 4e-3),
    ("grouped_linear", FP32): (2e-6, 4e-6),
    ("grouped_linear", BF16): (8e-3, 8e-3),
    ("attention", FP32): (2e-6, 4e-6),
    ("attention", BF16): (2e-2, 2e-2),
}
