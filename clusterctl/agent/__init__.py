"""What runs on a node: this folder alone, standard library only, Python 3.8 and newer, sent there by its
hash."""
