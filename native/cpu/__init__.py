"""The ops on a CPU: C++ kernels, compiled by the installation or by `python -m native build`, and torch products."""
