"""Find a free port on the master for rank 0 to listen on, one that stays free until the rank binds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.errors import WorkFailed

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.connection import Connection


# Seconds pass until a rank binds the port. Meanwhile the kernel may give a port of its range to an outgoing connection,
# so the port is below that range, where about ten thousand are free (Kubernetes uses those from 30000 on). The choice
# is random, because two launches may ask at the same time.
ASK = """
import random, socket
def is_free(port):
    with socket.socket() as door:
        try:
            door.bind(("", port))
        except OSError:
            return False
        return True
try:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = min(int(file.read().split()[0]), 30000)
except (OSError, ValueError, IndexError):
    first = 30000
ports = (random.randrange(20000, first) for _ in range(50)) if first > 21000 else ()
found = next((port for port in ports if is_free(port)), 0)
if not found:
    with socket.socket() as door:
        door.bind(("", 0))
        found = door.getsockname()[1]
print(found)
"""


def free_port(link: Connection, node: Node) -> int:
    """Return a port that is free on the master itself."""
    done = link.run([node.python, "-c", ASK], timeout=20.0)
    if done.exit_code != 0 or not done.stdout.strip().isdigit():
        output_lines = done.error_text.strip().splitlines()
        hint = "see `python` in the inventory: the program that the ranks are run with"
        raise WorkFailed(
            f"{node.name}: {node.python} found no free port: {output_lines[-1] if output_lines else done.exit_code}",
            hint,
        )
    return int(done.stdout)
