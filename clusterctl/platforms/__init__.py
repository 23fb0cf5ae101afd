"""Clusters that another program manages, such as Slurm: detect them, write and submit their job files."""
