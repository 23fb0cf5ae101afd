"""Other files that name nodes: hostfiles and node lists, read strictly and written again."""
