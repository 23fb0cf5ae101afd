"""Watch an active run: log lines, steps, use of devices, stalls."""
