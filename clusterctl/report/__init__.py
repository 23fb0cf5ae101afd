"""What a run leaves for people: its summary, curves, one HTML page, comparison with other runs, exports."""
