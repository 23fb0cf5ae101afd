"""Every read from a node, a server or a program is bounded in time and size; a new one needs an entry here."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3] / "clusterctl"
READS = (
    "os.read",
    "recv",
    "recv_into",
    "readline",
    "read_frame",
    "communicate",
    "read_line",
    "receive",
    "urlopen",
)
# Modules that talk to servers with a library: there, every `read` counts too.
SERVERS = (
    "clusterctl/downloads",
    "clusterctl/storage/program",
    "clusterctl/runs/notify",
    "clusterctl/backends",
)
# A daemon's output goes to its log; the starter ends once it runs.
STARTERS = {"sandbox/process.py"}
PROGRAMS = ("subprocess.run", "subprocess.check_output", "subprocess.check_call", "subprocess.call")
# File and call: how often it occurs, and what bounds it.
BOUNDED = {
    ("agent/bootstrap.py", "readline"): (2, "of the launcher that started it, over its own login"),
    ("agent/bounded.py", "os.read"): (1, "one piece, until a deadline; `limit` bytes are kept"),
    ("agent/child.py", "os.read"): (
        1,
        "CHUNK bytes, when select reports it; the launcher's window bounds what is sent",
    ),
    ("agent/files/peer.py", "recv_into"): (1, "the counted bytes; SO_RCVTIMEO"),
    ("agent/files/peer_tls.py", "recv_into"): (1, "one buffer; SO_RCVTIMEO"),
    ("agent/files/pieces.py", "read_line"): (1, "32 bytes"),
    ("agent/files/transfer.py", "read_line"): (1, "MAX_ANSWER bytes"),
    ("agent/network.py", "recv"): (1, "200 bytes, with the socket's timeout"),
    ("agent/processes.py", "os.read"): (1, "`limit` bytes of a file"),
    ("agent/ranks/attempts.py", "os.read"): (1, "LONGEST_LINE bytes, STARTING seconds"),
    ("agent/ranks/attempts.py", "readline"): (1, "200 characters of a file"),
    ("agent/ranks/changes.py", "os.read"): (1, "one piece of the kernel's notes, when it is readable"),
    ("agent/ranks/kernel.py", "os.read"): (1, "one message, never waits; DMESG_LIMIT seconds in all"),
    ("agent/ranks/mpi_links.py", "readline"): (
        4,
        "100 bytes, or LONGEST, of a node with the run's key; ends with mpirun",
    ),
    ("agent/ranks/mpi_links.py", "receive"): (
        3,
        "one line; 10 s until the node is known, then ends with mpirun",
    ),
    ("agent/ranks/supervisor.py", "os.read"): (1, "one piece, when select reports it"),
    ("agent/server.py", "read_frame"): (1, "MAX_PAYLOAD bytes of the launcher; ends when it is silent"),
    ("cli/runs/top.py", "os.read"): (1, "16 bytes of the keyboard, after a select"),
    ("checks/touch.py", "readline"): (
        2,
        "of its own children; the agent ends the program after its time limit",
    ),
    ("cli/clusters/selftest.py", "communicate"): (2, "the time that is left, and GRACE seconds"),
    ("cli/screen.py", "readline"): (1, "a person's answer at the terminal"),
    ("downloads/fetch.py", "server's read"): (3, "PIECE or MOST_SUMS bytes; SILENCE seconds"),
    ("jobs/run_folder.py", "readline"): (2, "LONGEST_LINE bytes of a file"),
    ("backends/slurm/programs.py", "communicate"): (1, "ANSWER_LIMIT seconds, of Slurm's own programs"),
    ("backends/queue.py", "server's read"): (1, "LOG_END bytes of a file"),
    ("runs/notify.py", "urlopen"): (1, "LIMIT seconds; the answer is not read"),
    ("sandbox/cluster.py", "readline"): (1, "255 bytes, with the socket's timeout"),
    ("sandbox/embedded.py", "os.read"): (1, "CHUNK bytes of a command; ends with its session"),
    ("sandbox/embedded.py", "recv"): (1, "CHUNK bytes of a session; ends with it"),
    ("sandbox/spawn.py", "os.read"): (1, "one byte of its own child; ends with its exec"),
    ("storage/program.py", "readline"): (1, "of the launcher that started it"),
    # Two of them call `Store.read`.
    ("storage/program.py", "server's read"): (4, "MOST_TEXT or the piece's bytes; read_timeout seconds"),
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
    ("ssh/packets.py", "recv"): (1, "one piece, with the socket's timeout"),
    ("ssh/session.py", "readline"): (1, "MAX_BANNER bytes, MAX_LINES lines, until a deadline"),
    ("transport/dial.py", "recv"): (1, "counted bytes, with the socket's timeout"),
    ("backends/steps.py", "recv"): (2, "one piece, when the socket is readable"),
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
            name = whole if whole in (*READS, *PROGRAMS) else whole.rpartition(".")[2]
            is_read = name == "read" and path.relative_to(ROOT.parent).as_posix().startswith(SERVERS)
            found.append(("server's read" if is_read else name, node))
    return found


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def test_every_read_is_listed_with_its_bound() -> None:
    found = Counter(
        (path.relative_to(ROOT).as_posix(), name)
        for path in sources()
        for name, _ in calls(path)
        if name in (*READS, "server's read")
    )
    assert dict(found) == {key: count for key, (count, _) in BOUNDED.items()}


def test_every_program_that_is_waited_for_has_a_time_limit() -> None:
    unlimited = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sources()
        if path.relative_to(ROOT).as_posix() not in STARTERS
        for name, call in calls(path)
        if name in PROGRAMS and "timeout" not in [keyword.arg for keyword in call.keywords]
    ]
    assert not unlimited


def test_requests_to_a_server_of_texts_are_read_in_one_place() -> None:
    reads = ("read", "json", "text", "post", "multipart", "iter_any", "iter_chunked", "readany", "readline")
    found = [
        f"{path.name}: {ast.unparse(call.func)}"
        for path in sorted((ROOT.parent / "trainer" / "serve").glob("*.py"))
        for _, call in calls(path)
        if isinstance(call.func, ast.Attribute) and call.func.attr in reads
        if ast.unparse(call.func).startswith("request.")
    ]
    # `limits.body` bytes within `limits.body_seconds`.
    assert found == ["service.py: request.content.iter_any"]
