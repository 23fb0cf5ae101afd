"""Jobs: job.yaml becomes a Job, then a Plan; the run folder records the run."""
