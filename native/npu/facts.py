"""What the documents of CANN and torch_npu say about each kernel: chips and types, forward and backward.

The choice of ops, the plan's chips, the tests' stand-in of torch_npu and docs/reference/versions.md read these rows.
"""

from __future__ import annotations

from dataclasses import dataclass

# The first generation (Atlas training products) as CANN names its chips: an Ascend910B without a digit belongs to it.
FIRST = ("910A", "910B", "910ProA", "910ProB", "910PremiumA")
# Generation -> the types that its kernels compute with. Documents of CANN's operators: "Atlas training series" has no
# bfloat16.
ALL = ("fp32", "bf16", "fp16")
GENERATIONS = {"910": ("fp32", "fp16"), "A2": ALL, "A3": ALL, "950": ALL}
# Where a weight may have another type than the input.
OWN, OWN_OR_FP32 = "as x", "as x, or fp32"


@dataclass(frozen=True)
class Kernel:
    """A function of torch_npu, or torch's own on an NPU."""

    chips: tuple[str, ...]
    """Generations that its document lists, or that of the kernel that it calls."""
    types: tuple[str, ...]
    source: str
    """A file of op-plugin (commit 517f2e7), ops-nn (commit e5c3fa9) or ops-transformer (commit c29bc10)."""
    weight: str = OWN
    backward: str = ""
    """The row of its derivative; "" where torch_npu has none."""


_EVERY, _LATER = ("910", "A2", "A3", "950"), ("A2", "A3", "950")
# fmt: off
KERNELS = {
    "layer_norm": Kernel(_EVERY, ALL, "op-plugin, LayerNormKernelNpuOpApi.cpp", OWN_OR_FP32, "layer_norm_backward"),
    "layer_norm_backward": Kernel(_EVERY, ALL, "ops-nn, aclnnLayerNormBackward.md", OWN_OR_FP32),
    "npu_rms_norm": Kernel(_LATER, ALL, "ops-nn, aclnnRmsNorm.md", OWN_OR_FP32, "npu_rms_norm_backward"),
    "npu_rms_norm_backward": Kernel(_LATER, ALL, "ops-nn, aclnnRmsNormGrad.md", OWN_OR_FP32),
    "npu_add_rms_norm": Kernel(_LATER, ALL, "torch_npu-npu_add_rms_norm.md"),
    "npu_add_layer_norm": Kernel(_LATER, ALL, "ops-nn, aclnnAddLayerNorm.md", OWN_OR_FP32,
                                 "npu_add_layer_norm_backward"),
    "npu_add_layer_norm_backward": Kernel(_LATER, ALL, "ops-nn, add_layer_norm_grad_def.cpp"),
    "npu_gelu": Kernel(_EVERY, ALL, "ops-nn, aclnnGeluV2.md", backward="npu_gelu_backward"),
    "npu_gelu_backward": Kernel(_EVERY, ALL, "ops-nn, aclnnGeluBackwardV2.md"),
    "npu_fast_gelu": Kernel(("910", "A2", "A3"), ALL, "torch_npu-npu_fast_gelu.md"),
    "npu_swiglu": Kernel(_LATER, ALL, "ops-nn, aclnnSwiGlu.md", backward="npu_swiglu_backward"),
    "npu_swiglu_backward": Kernel(_LATER, ALL, "ops-nn, aclnnSwiGluGrad.md"),
    "npu_rotary_mul": Kernel(_EVERY, ALL, "torch_npu-npu_rotary_mul.md; rotary_position_embedding_def.cpp"),
    "npu_cross_entropy_loss": Kernel(_LATER, ALL, "torch_npu-npu_cross_entropy_loss.md",
                                     backward="npu_cross_entropy_loss_backward"),
    "npu_cross_entropy_loss_backward": Kernel(_LATER, ALL, "ops-nn, aclnnCrossEntropyLossGrad.md"),
    "npu_grouped_matmul": Kernel(("A2", "A3"), ALL, "torch_npu-npu_grouped_matmul.md"),
    "npu_fusion_attention": Kernel(_LATER, ALL, "torch_npu-npu_fusion_attention.md; flash_attention_score_def.cpp",
                                   backward="npu_fusion_attention_grad"),
    "npu_fusion_attention_grad": Kernel(_LATER, ALL, "ops-transformer, flash_attention_score_grad_def.cpp"),
    "npu_fused_infer_attention_score": Kernel(("A2", "A3"), ("fp16", "bf16"),
                                              "torch_npu-npu_fused_infer_attention_score.md"),
    "npu_apply_adam_w": Kernel(_EVERY, ALL, "op-plugin, op_plugin_functions.yaml: acl_op, op_api"),
    "_fused_adamw_": Kernel(_LATER, ALL, "ops-nn, apply_adam_w_v2_def.cpp"),
}
# fmt: on


def generation(name: str) -> str:
    """Return the generation of a chip by the name that torch_npu reports: `Ascend910B3`; "" for an unknown one."""
    short = name.removeprefix("Ascend")
    if short in FIRST:
        return "910"
    begins = {"910B": "A2", "910_": "A3", "910C": "A3", "950": "950"}
    return next((known for begin, known in begins.items() if short.startswith(begin)), "")


def types(kernel: str, chips: str) -> tuple[str, ...]:
    """Return the types in which a kernel computes on a generation, "" for an unknown one; () if it does not."""
    row = KERNELS[kernel]
    if not chips:
        return row.types
    return tuple(entry for entry in row.types if chips in row.chips and entry in GENERATIONS[chips])
