"""What a command may not leave behind: processes, listening ports, files outside its own folder."""

from __future__ import annotations

import os
from pathlib import Path


def processes_of(folder: Path) -> list[str]:
    """Living processes that belong to a folder: by environment, command line or working folder."""
    wanted = os.fsencode(str(folder))
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            seen = words + (entry / "environ").read_bytes() + os.fsencode(os.readlink(entry / "cwd"))
            if wanted in seen and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(f"{entry.name}: {words.replace(bytes(1), b' ').decode(errors='replace')[:120]}")
        except OSError:
            continue
    return found


def listening() -> set[tuple[str, int]]:
    """The TCP addresses that something listens on."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, port = fields[1].rsplit(":", 1)
                # The kernel prints IPv4 as a little-endian number.
                octets = bytes.fromhex(address)[::-1]
                name = ".".join(map(str, octets)) if len(octets) == 4 else address
                found.add((name, int(port, 16)))
    return found
