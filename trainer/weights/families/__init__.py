"""The model families of Hugging Face: of each the names of its tensors, and its config.json in both directions."""
