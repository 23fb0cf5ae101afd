"""What is to be run: job.yaml becomes a Job, then a Plan; the run folder records it."""
