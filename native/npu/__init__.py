"""The ops on Ascend NPUs: CANN's fused attention and AdamW; the reference computes the rest."""
