"""Native code for the index of samples."""
