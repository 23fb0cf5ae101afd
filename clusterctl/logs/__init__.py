"""Keep the output of ranks in files, and show it as whole lines or folded lines."""
