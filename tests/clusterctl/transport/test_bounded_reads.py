"""Every read from a node or a program in these folders is bounded in time and size; a new one needs an entry here."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3] / "clusterctl"
FOLDERS = ("transport", "ssh", "keeper", "exec", "transfer")
READS = ("os.read", "recv", "readline", "read_frame", "communicate", "read_line", "receive")
PROGRAMS = ("subprocess.run", "subprocess.check_output", "subprocess.check_call", "subprocess.call")
# File and call: how often it occurs, and what bounds it.
BOUNDED = {
    ("exec/command.py", "os.read"): (1, "CHUNK bytes of this command's own standard input"),
    ("keeper/client.py", "os.read"): (1, "64 bytes, after a select with START_LIMIT"),
    ("keeper/client.py", "read_frame"): (1, "MAX_PAYLOAD bytes; ends with the keeper"),
    ("keeper/client.py", "recv"): (1, "RECEIVE bytes; ends with the keeper"),
    ("keeper/clients.py", "read_frame"): (1, "MAX_PAYLOAD bytes; ends with the command"),
    ("keeper/clients.py", "recv"): (1, "RECEIVE bytes; ends with the command"),
    ("ssh/openssh_child.py", "os.read"): (
        3,
        "one piece each, when poll reports it; MAX_NOISE for the rest of stderr",
    ),
    ("ssh/openssh_child.py", "recv"): (1, "one byte, never waits"),
    ("ssh/packets.py", "os.read"): (1, "one piece, never waits"),
    ("ssh/packets.py", "recv"): (1, "one piece, with the socket's timeout"),
    ("ssh/session.py", "readline"): (1, "MAX_BANNER bytes, MAX_LINES lines, until a deadline"),
    ("transport/dial.py", "recv"): (1, "counted bytes, with the socket's timeout"),
    ("transport/srun.py", "recv"): (2, "one piece, when the socket is readable"),
    ("transport/link.py", "read_line"): (1, "MAX_NOISE bytes, START_LIMIT seconds"),
    ("transport/link.py", "receive"): (1, "one piece, BEAT seconds"),
    ("transport/poller.py", "recv"): (1, "WAKES bytes, never waits"),
    ("transport/local.py", "os.read"): (1, "one piece, when poll reports it"),
}


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            whole = ast.unparse(node.func)
            found.append((whole if whole in (*READS, *PROGRAMS) else whole.rpartition(".")[2], node))
    return found


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]


def test_every_read_is_listed_with_its_bound() -> None:
    found = Counter(
        (path.relative_to(ROOT).as_posix(), name)
        for path in sources()
        for name, _ in calls(path)
        if name in READS
    )
    assert dict(found) == {key: count for key, (count, _) in BOUNDED.items()}


def test_every_program_that_is_waited_for_has_a_time_limit() -> None:
    unlimited = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sources()
        for name, call in calls(path)
        if name in PROGRAMS and "timeout" not in [keyword.arg for keyword in call.keywords]
    ]
    assert not unlimited
