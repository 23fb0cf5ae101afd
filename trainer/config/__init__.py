"""What to train: frozen sections and their rules; imports neither torch nor NumPy."""
