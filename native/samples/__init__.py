"""Compiled code that builds and reads the index of samples."""
