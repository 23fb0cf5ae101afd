"""Formats that contain any program's model under its own names: DeepSpeed's, and torch's distributed checkpoints."""
