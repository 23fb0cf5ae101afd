"""Call one of the functions of faulty.cpp: `call_faulty.py LIBRARY address|thread`."""

from __future__ import annotations

import ctypes
import sys

NUMBERS = 100_000
memory = ctypes.CDLL(None)
memory.malloc.restype = ctypes.c_void_p
numbers = ctypes.c_void_p(memory.malloc(ctypes.c_size_t(4 * NUMBERS)))
name = {"address": "write_after_the_end", "thread": "add_without_order"}[sys.argv[2]]
getattr(ctypes.CDLL(sys.argv[1]), name)(numbers, ctypes.c_int64(NUMBERS))
