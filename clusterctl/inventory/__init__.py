"""Which nodes there are: cluster.yaml becomes a Cluster; node sets select from it."""
