"""What it costs to install nodes, and to move files to an object store, next to the usual tools."""
