"""What is seen of a run while it is active: log lines, steps, use of devices, stalls."""
