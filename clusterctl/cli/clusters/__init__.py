"""Commands that make a cluster: `init`, `sandbox` and `demo`."""
