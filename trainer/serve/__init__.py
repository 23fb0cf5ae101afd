"""The HTTP server for a decoder: OpenAI's API, Megatron's API, metrics, and a page to try the model."""
