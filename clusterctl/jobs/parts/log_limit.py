"""How much of a disk the logs of a rank may take."""

from __future__ import annotations

from clusterctl.inventory.cluster import bytes_of

# Bytes of each stream of a rank, on its node and on the launching machine: 64 ranks take at most 32 GB here.
LOG_LIMIT = 256 << 20
# A smaller log would lose lines before they are copied.
LEAST = 16_000_000


def limit_of(value: object) -> int:
    """Return the bytes of a size such as 1GB, 0 for off; raise ValueError for anything else."""
    # YAML reads `off` as false.
    if value in (False, "off"):
        return 0
    limit = int(bytes_of(str(value)))
    if limit < LEAST:
        raise ValueError(f"{value!r} is no size of at least 16 MB", "as in 500MB or 2GB; off for no limit")
    return limit
