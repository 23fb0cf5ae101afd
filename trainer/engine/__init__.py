"""One optimizer step over any layout, by torch or by DeepSpeed."""
