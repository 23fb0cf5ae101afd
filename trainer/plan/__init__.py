"""What a config costs: memory and time; `parallel: auto`; warnings. Imports no torch."""
