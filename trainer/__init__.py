"""The embedded trainer: models, data and training steps. The launcher starts it on the nodes."""
