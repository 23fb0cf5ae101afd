"""Read where the main thread of a Python program stands, from what py-spy or Python's own faulthandler wrote.

Runs on nodes too: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple

# A thread in the output of each, and one of its frames. A prefix of the line may have taken one of its blanks.
SPIED_THREAD = re.compile(r"Thread \S+ \(.*?\)(?:: \"(?P<name>.*)\")?$")
SPIED_FRAME = re.compile(r"    (?P<function>.+?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")
WRITTEN_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
WRITTEN_FRAME = re.compile(r' {1,2}File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')
MAIN = "MainThread"
# Limit of frames that are kept, from the innermost on, and of characters of a source line.
MOST, WIDEST = 40, 160


class Frame(NamedTuple):
    """One function on a stack."""

    function: str
    file: str
    line: int
    """0 if it is not known."""

    def text(self) -> str:
        """Return its line of source, if the file is on this node."""
        import linecache

        return linecache.getline(self.file, self.line).strip()[:WIDEST]


def frames_in(text: str) -> List[Frame]:
    """Return the frames of the main thread, the innermost first; [] if the text has none.

    Of several outputs, the last one counts.
    """
    threads: Dict[str, List[Frame]] = {}
    name, begins = "", True
    for line in text.splitlines():
        spied, written = SPIED_THREAD.match(line), WRITTEN_THREAD.match(line)
        if spied or written:
            # Python writes the main thread last, because it is the oldest one.
            name, begins = (spied["name"] or "" if spied else MAIN), True
            continue
        frame = SPIED_FRAME.match(line) or WRITTEN_FRAME.match(line)
        if frame and (begins or len(threads[name]) < MOST):
            number = frame["line"] or ""
            found = Frame(frame["function"], frame["file"], int(number) if number.isdigit() else 0)
            # An output that was cut off before its first frame replaces none.
            threads[name] = [found] if begins else [*threads[name], found]
            begins = False
    return threads.get(MAIN) or next((found for found in reversed(list(threads.values())) if found), [])
