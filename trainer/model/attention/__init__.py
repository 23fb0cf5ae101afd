"""The kinds of attention, one module each: parameters, their division among ranks, and computation over a cache."""
