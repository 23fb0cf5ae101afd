"""PBS: qsub submits, the hosts of a job are reached over SSH."""
