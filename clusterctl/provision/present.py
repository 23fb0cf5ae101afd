"""Check with one line of shell whether a node has an environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterctl.inventory.cluster import Node
from clusterctl.provision.install import MARK
from clusterctl.transfer.unchanged import at_home
from clusterctl.transport.fanout import Connections, Outcome, on_each
from clusterctl.transport.shell import ShellSession
from clusterctl.wire.typed_json import BadValue, decode, parse

QUERY = (
    "cat {link}/{mark} 2>/dev/null; echo; test -x {link}/bin/python && echo runs; "
    "test -e {link} && ! test -L {link} && echo foreign; true"
)


@dataclass(frozen=True)
class _Mark:
    """The part of an environment's mark that is compared."""

    fingerprint: str


def query_line(link: str) -> str:
    """Return the shell command that reports the state of an environment."""
    return QUERY.format(link=at_home(link), mark=MARK)


def seen_in(output: str) -> tuple[str, bool]:
    """Return the fingerprint of a complete environment, or "", and whether the path exists and is not a link."""
    text, _, rest = output.partition("\n")
    try:
        mark = decode(_Mark, parse(text))
    except BadValue:
        mark = _Mark("")
    words = rest.split()
    return (mark.fingerprint if "runs" in words else ""), "foreign" in words


def complete_on(
    connections: Connections, nodes: Sequence[Node], links: dict[str, str], fanout: int
) -> list[Outcome[str]]:
    """Return the fingerprint of each node's environment; without kept connections, start neither agent nor fabric."""
    with ShellSession(connections.transport) as once:

        def work(node: Node) -> str:
            argv = ["/bin/sh", "-c", query_line(links[node.name])]
            if connections.kept:
                done = connections.of(node).run(argv)
                output = done.stdout
            else:
                parts: list[bytes] = []
                once.run(
                    node,
                    argv,
                    env={},
                    timeout=None,
                    on_output=lambda stream, data: _keep(parts, stream, data),
                )
                output = b"".join(parts)
            fingerprint, foreign = seen_in(output.decode("utf-8", "replace"))
            return "" if foreign else fingerprint

        return on_each(nodes, work, fanout=fanout)


def _keep(parts: list[bytes], stream: str, data: bytes) -> None:
    if stream == "stdout":
        parts.append(data)
