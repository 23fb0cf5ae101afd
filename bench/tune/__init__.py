"""Measure fine-tuning next to transformers and peft."""
