"""Find, verify, compare, fetch, copy and prune the checkpoints of a run on its nodes, on this machine and in stores."""
