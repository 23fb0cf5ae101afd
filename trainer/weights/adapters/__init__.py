"""Adapters of low rank: together with the weights that they belong to, and as folders of PEFT."""
