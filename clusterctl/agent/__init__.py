"""The program that runs on a node: standard library alone, Python 3.8 and newer; it is shipped as this folder."""
