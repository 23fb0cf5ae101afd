"""The ops on Ascend NPUs: CANN's kernels through torch_npu; the reference computes the ops that CANN does not have."""
