"""Grid Engine: qsub submits, qrsh reaches the hosts of a job."""
