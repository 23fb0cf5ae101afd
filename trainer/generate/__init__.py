"""Text generation: a decoder with a paged KV cache, sampling, and continuous batching of requests."""
