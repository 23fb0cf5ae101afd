"""Store the output of ranks in files, and show it as complete lines or folded lines."""
