"""The model families of Hugging Face: the names of their tensors, and how their config.json is read and written."""
