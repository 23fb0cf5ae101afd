"""The Python API behind clusterctl.api: nodes, runs and functions as objects."""
