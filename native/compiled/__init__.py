"""How the C++ library is built, checked and loaded."""
