"""Commands on nodes: `nodes`, `exec`, `push`, `doctor` and others."""
