"""Text from a model: a decoder with a paged cache, sampling, and continuous batches of requests."""
