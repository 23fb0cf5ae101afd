"""One command on many nodes, and how its output is shown."""
