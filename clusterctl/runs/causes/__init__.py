"""Why a run failed: evidence from the nodes, the first failure, and what it means."""
