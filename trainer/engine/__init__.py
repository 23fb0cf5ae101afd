"""One optimizer step in any layout, with torch or with DeepSpeed."""
