"""Plan a training: memory and time of a config, `parallel: auto`, and warnings. Imports no torch."""
