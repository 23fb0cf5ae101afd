"""Connect to nodes and run work on many of them in parallel; knows nothing of SSH."""
