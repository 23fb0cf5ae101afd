"""The GPT and GLM models and their layers."""
