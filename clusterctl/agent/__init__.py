"""The agent, the program on a node: standard library only, Python 3.8 or newer; this folder is sent to the node."""
