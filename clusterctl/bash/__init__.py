"""Evaluates shell scripts without running anything: which commands they start, and what cannot be known."""
