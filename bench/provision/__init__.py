"""The cost of installing nodes and of moving files to an object store, compared with the usual tools."""
