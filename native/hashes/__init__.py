"""Compiled code that hashes files."""
