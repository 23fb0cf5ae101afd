"""Folders to nodes and back: only what is missing travels, and it is verified."""
