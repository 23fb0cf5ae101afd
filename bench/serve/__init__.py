"""How fast a model generates, directly and over HTTP."""
