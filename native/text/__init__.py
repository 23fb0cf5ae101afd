"""Native code for texts: byte pair encoding, JSON lines."""
