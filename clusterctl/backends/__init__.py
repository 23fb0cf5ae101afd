"""What starts the ranks of a run: SSH, a batch system such as Slurm, or the pods of a platform."""
