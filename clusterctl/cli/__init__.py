"""Flags become calls, values become text on the screen; one file per noun."""
