"""The config of a training: frozen sections and their rules; imports neither torch nor NumPy."""
