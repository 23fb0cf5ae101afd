"""Runs under a virtual clock: the decisions of controller, supervisor and `stop`, with nodes and networks of values."""
