"""Real SSH nodes on this machine, for the demo and the tests."""
