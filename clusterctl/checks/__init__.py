"""The checks of `doctor` and of every launch; each result is a Finding."""
