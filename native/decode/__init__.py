"""Products with packed weights and attention over a paged cache, for text generation on a CPU."""
