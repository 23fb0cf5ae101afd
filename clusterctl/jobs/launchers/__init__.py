"""Commands that start the ranks of a node themselves: how they are found in a command line, and what is filled in."""
