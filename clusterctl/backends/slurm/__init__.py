"""Slurm: sbatch submits, srun reaches the nodes of an allocation."""
