"""Folders and checkpoints on this node: received, sent, remembered and verified."""
