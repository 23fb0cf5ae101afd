"""Build, check and load the C++ library."""
