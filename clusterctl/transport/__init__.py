"""One connection per node, and one fan-out that returns an outcome for each; knows nothing of SSH."""
