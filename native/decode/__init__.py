"""For text generation on a CPU: products with packed weights, and attention over a paged cache."""
