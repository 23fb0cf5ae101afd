"""Reports about a run: its summary, curves, HTML page, comparison with other runs, and exports."""
