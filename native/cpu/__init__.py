"""CPU: cross-entropy in C++, built by the install or by `python -m native build`; attention in blocks."""
