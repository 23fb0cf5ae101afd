"""From a handful of machines that answer to SSH to a trained GPT or GLM."""

__version__ = "0.1.0"
