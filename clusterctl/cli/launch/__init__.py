"""Commands that start a job and follow it: over SSH, on Slurm and on Kubernetes."""
