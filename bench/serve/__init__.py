"""How fast a model generates, directly and over HTTP, and whether a server survives hostile clients."""
