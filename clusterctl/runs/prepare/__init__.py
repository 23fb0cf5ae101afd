"""What a run needs on its nodes before its ranks start: code, data, setups, a port."""
