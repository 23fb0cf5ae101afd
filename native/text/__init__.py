"""Compiled code for text: byte pair encoding and reading JSON lines."""
