"""The ranks of a run on this node: started, recorded, followed and ended."""
