"""Compiled code for text: byte pair encoding, and reading of JSON lines."""
