"""Bytes of ranks become files, whole lines and folded lines."""
