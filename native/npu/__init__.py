"""The ops on Ascend NPUs: CANN's kernels through torch_npu; the reference computes what CANN does not have."""
