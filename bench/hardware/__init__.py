"""Measure one device: facts, every op, training steps and decoding next to other programs, in a few minutes."""
