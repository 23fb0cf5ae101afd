"""What npu-smi says of a node's devices while an attempt begins, for `logs pull` to lay beside what it says later.

Nobody waits for it: of sixteen devices it takes up to 6 s, and of a driver that hangs for ever. Runs on nodes too:
standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Any, Dict, Optional

TOOLS = ("npu-smi", "/usr/local/bin/npu-smi")  # on the path, and where the vendor puts it


class Before:
    """The program under way; nothing where the node has no NPUs or no such program."""

    def __init__(self, spec: Dict[str, Any], path: str) -> None:
        self._process: Optional["subprocess.Popen[bytes]"] = None
        tool = next((found for one in TOOLS for found in [shutil.which(one)] if found), None)
        if spec.get("kind") != "npu" or tool is None:
            return
        try:
            with open(path, "wb") as file:
                self._process = subprocess.Popen(
                    [tool, "info"], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
        except OSError:
            return  # a full disk is told by what needs it

    def end(self) -> None:
        """It has had its time."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
