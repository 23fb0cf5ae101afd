"""How fast a model generates, alone and over HTTP, and whether a server stands hostile clients."""
