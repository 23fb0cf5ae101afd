"""HTTP over the decoder: OpenAI's API, Megatron's, metrics, and a page to try the model."""
