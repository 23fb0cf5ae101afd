""".bin/.idx files become samples and batches; the position is a number of samples."""
