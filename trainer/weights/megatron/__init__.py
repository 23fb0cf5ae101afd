"""Folders of Megatron-LM and of Megatron-core: names, settings, weights and the state of optimizers."""
