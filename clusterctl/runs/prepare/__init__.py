"""Prepare the nodes of a run before its ranks start: code, data, setups, a port."""
