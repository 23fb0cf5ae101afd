"""Other files that name nodes: hostfiles and Slurm node lists, read strictly and written again."""
