"""Let torch take its large CPU buffers from a pool, which needs less memory than glibc's heap at the same speed."""

from __future__ import annotations

import functools

from native.compiled.arguments import SIZE, function
from native.compiled.library import POOL_VARIABLE, LibraryMissing, may_pool

# The pool takes addresses, not memory: 1 TiB of them, so that gaps never fill it.
CAPACITY = 1 << 40

# The numbers of `enum Outcome` in torch_pool.cpp.
_REASONS = {
    1: "the system does not give a process 1 TiB of addresses",
    2: "torch is not loaded",
    3: "this torch has another allocator",
    4: "the system does not allow to change torch's table of imported functions",
}


@functools.cache
def serve_torch() -> str:
    """Let torch, which must be imported, use the pool from now on; return why it cannot, or an empty string.

    Buffers of 256 KiB and more then come from the pool. Tensors that exist already keep their memory.
    """
    if not may_pool():
        return f"{POOL_VARIABLE} is never"
    try:
        serve = function("native_pool_serve_torch", SIZE, SIZE)
    except LibraryMissing as reason:
        return str(reason)
    outcome = int(serve(CAPACITY))
    return _REASONS[outcome] if outcome else ""
