"""LSF: bsub submits, blaunch reaches the hosts of a job."""
