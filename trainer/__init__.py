"""The embedded trainer: models, data and steps. It knows nothing of nodes; the launcher starts it."""
