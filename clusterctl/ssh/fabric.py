"""Give users' scripts fabric connections that clusterctl has logged in, after checking the host keys.

fabric's own client would accept any host key, and would read ~/.ssh/config in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from clusterctl.ssh.load_paramiko import load_paramiko

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.ssh.gateways import Login

OnOutput = Callable[[str, bytes], None]


class Writer(Protocol):
    """A stream that takes text."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


class Logins(Protocol):
    """Logs in to nodes with paramiko after checking their host keys."""

    def log_in(self, node: Node) -> Login:
        """Return a login; the caller closes it."""


@contextmanager
def fabric_connection(
    logins: Logins, node: Node, out: Writer | None = None, err: Writer | None = None
) -> Iterator[Any]:
    """Yield a `fabric.Connection` to a node, through its gateways; it is closed at the end.

    `out` and `err` receive the output of its commands; by default it is written to this program's own streams.
    """
    first = logins.log_in(node)
    try:
        connection = _connection(logins, node, first, {"out_stream": out, "err_stream": err})
    except BaseException:
        first.close()
        raise
    try:
        yield connection
    finally:
        # A task may have closed the first login and opened another one.
        connection.close()
        first.close()


def _connection(logins: Logins, node: Node, first: Login, streams: dict[str, Writer | None]) -> Any:
    load_paramiko()
    import fabric
    import paramiko

    refuse_unknown_keys()

    class CheckedConnection(fabric.Connection):  # type: ignore[misc]
        """A connection that logs in as clusterctl does, whenever fabric opens it."""

        def open(self) -> None:
            if not self.is_connected:
                use(self, logins.log_in(node))

        def run(self, command: str, **options: Any) -> Any:
            return super().run(command, **_hidden(options))

        def sudo(self, command: str, **options: Any) -> Any:
            return super().sudo(command, **_hidden(options))

        def local(self, *words: Any, **options: Any) -> Any:
            return super().local(*words, **_hidden(options))

    def use(connection: Any, login: Login) -> None:
        # Fabric waits for channels as paramiko does, so a thread must read the connection.
        login.session.start()
        client = paramiko.SSHClient()
        client._transport = login.session  # type: ignore[attr-defined]
        connection.client, connection.transport = client, login.session

    # Tasks get no standard input, because they run on many nodes at the same time.
    run = {
        "in_stream": False,
        "env": dict(node.env),
        **{key: value for key, value in streams.items() if value},
    }
    nothing = fabric.Config(overrides={"run": run}, ssh_config=paramiko.SSHConfig(), lazy=True)
    connection = CheckedConnection(node.host, user=first.user, port=node.port, config=nothing)
    use(connection, first)
    return connection


def _hidden(options: dict[str, object]) -> dict[str, object]:
    """Return the options of a command with `hide` obeyed: invoke ignores it where a connection has own streams."""
    hide = options.get("hide")
    found, nowhere = dict(options), NodeStream("", lambda name, data: None)
    if hide in (True, "both", "out", "stdout"):
        found.setdefault("out_stream", nowhere)
    if hide in (True, "both", "err", "stderr"):
        found.setdefault("err_stream", nowhere)
    return found


class NodeStream:
    """A text stream that passes each text written to it to `on_output`, as output of one node."""

    encoding = "utf-8"

    def __init__(self, name: str, on_output: OnOutput) -> None:
        self._name, self._on_output = name, on_output

    def write(self, text: str) -> int:
        if text:
            self._on_output(self._name, text.encode("utf-8", "surrogateescape"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write is passed on immediately."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        # invoke copies every stream without this method.
        raise OSError("a node's output has no file")


def refuse_unknown_keys() -> None:
    """Make connections that a script opens itself refuse unknown host keys; fabric would accept every key."""
    import fabric.connection
    import paramiko

    fabric.connection.AutoAddPolicy = paramiko.RejectPolicy
