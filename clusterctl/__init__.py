"""Start, train and serve models on machines that are reached over SSH."""

__version__ = "0.1.0"
