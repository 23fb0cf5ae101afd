"""Connections that outlive a command."""
