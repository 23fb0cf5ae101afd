"""Start, record, follow and end the ranks of a run on this node."""
