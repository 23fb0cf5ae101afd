"""The model families of Hugging Face: the names of their tensors, and the reading and writing of their config.json."""
