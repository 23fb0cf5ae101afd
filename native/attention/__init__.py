"""C++ code of attention that stores no scores: one kernel, compiled for each instruction set."""
