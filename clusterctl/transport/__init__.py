"""Connect to nodes and run work on many of them in parallel, with an outcome for each; knows nothing of
SSH."""
