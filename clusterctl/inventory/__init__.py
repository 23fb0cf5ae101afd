"""The inventory of nodes: cluster.yaml is read into a Cluster, and node sets select from it."""
