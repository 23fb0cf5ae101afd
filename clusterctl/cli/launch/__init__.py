"""Commands that start a job and follow it: here, on nodes, on Slurm and on Kubernetes."""
