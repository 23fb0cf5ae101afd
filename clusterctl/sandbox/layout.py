"""The files of a sandbox: state, keys, inventory and the folders of its nodes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.files import InFolder, replace_file
from clusterctl.sandbox import devices as sandbox_devices
from clusterctl.wire.typed_json import BadValue, decode, parse

# The version of state.json.
VERSION = 1
MODES = ("namespaces", "loopback", "embedded")
# In mode namespaces this many take 66 s and 3.4 GB of memory on two cores.
MAX_NODES = 1000
# One address each, all in one /24.
MAX_ON_LOOPBACK = 250
# Characters of TMPDIR: the path of a socket has at most 108, and Python and torch append names to TMPDIR.
SOCKET_ROOM = 70


@dataclass(frozen=True)
class SandboxNode:
    """One node of a sandbox."""

    name: str
    # Counted from 1.
    index: int
    # Where SSH connects.
    host: str
    # The address that ranks use.
    address: str
    interface: str
    # 0 until a free one was found.
    port: int = 0


@dataclass(frozen=True)
class Layout:
    """Paths in the folder of a sandbox."""

    directory: Path

    @property
    def id(self) -> str:
        """Return the id that marks the processes of this sandbox; the same folder always has the same id."""
        return hashlib.sha256(str(self.directory).encode()).hexdigest()[:10]

    @property
    def subnet(self) -> str:
        """Return the third part of the nodes' addresses in mode namespaces."""
        return str(int(self.id[:2], 16))

    @property
    def loopback(self) -> str:
        """Return the first three parts of the loopback addresses: one of 16,384, so that sandboxes seldom collide."""
        return f"127.{64 + int(self.id[2:4], 16) % 64}.{self.subnet}"

    state = InFolder("state.json", "directory")
    lock = InFolder("lock", "directory")
    cluster_file = InFolder("cluster.yaml", "directory")
    known_hosts = InFolder("known_hosts", "directory")
    key = InFolder("keys/id_ed25519", "directory")
    authorized_keys = InFolder("keys/authorized_keys", "directory")
    processes = InFolder("processes", "directory")
    relay_ports = InFolder("relay.json", "directory")

    def host_key(self, node: SandboxNode) -> Path:
        return self.directory / "keys" / f"host_{node.name}"

    def node(self, node: SandboxNode) -> Path:
        return self.directory / node.name

    def home(self, node: SandboxNode) -> Path:
        return self.node(node) / "home"

    def tools(self, node: SandboxNode) -> Path:
        return self.node(node) / "bin"

    def etc(self, node: SandboxNode) -> Path:
        return self.node(node) / "etc"

    def log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def record(self, name: str) -> Path:
        return self.processes / f"{name}.json"

    def temporary(self, node: SandboxNode) -> Path | None:
        """Return TMPDIR of a node, or None if its path is too long for sockets below it."""
        path = self.node(node) / "tmp"
        return path if len(str(path)) <= SOCKET_ROOM else None


# The home folder as an isolated node sees it. The machine has no such folder.
HOME_APART = "/srv/sandbox"


@dataclass(frozen=True)
class State:
    """The content of state.json: enough to find and stop a sandbox, also one that was started only partly."""

    mode: str
    devices: int
    python: str
    user: str
    made_directory: bool
    nodes: tuple[SandboxNode, ...]
    # Whether `up` has finished.
    complete: bool = False
    # Whether a batch system manages the nodes.
    queue: bool = False
    # Whether the home folders have a path that the machine does not have.
    isolated: bool = False

    def save(self, layout: Layout) -> None:
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=2) + "\n"
        replace_file(layout.state, text, 0o600)


def load_state(layout: Layout) -> State | None:
    """Return the state of the sandbox in a folder, or None."""
    try:
        value = parse(layout.state.read_bytes())
        if isinstance(value, dict) and value.get("version") != VERSION:
            raise UsageError(f"{layout.state}: written by another version of clusterctl", _REMOVE)
        return decode(State, value)
    except FileNotFoundError:
        return None
    except BadValue as error:
        raise UsageError(f"{layout.state}: damaged: {error}", _REMOVE) from None


_REMOVE = "stop its processes and remove the folder by hand, or choose another --dir"


def make_folders(layout: Layout, state: State) -> None:
    """Make the folders of the sandbox and its nodes, and the files of the simulated devices."""
    for name in ("keys", "processes", "logs"):
        (layout.directory / name).mkdir(mode=0o700)
    for node in state.nodes:
        folders = [layout.node(node), layout.home(node), layout.tools(node), layout.etc(node)]
        for folder in [*folders, layout.temporary(node)]:
            if folder:
                folder.mkdir(mode=0o700)
        _write_devices(layout, state, node)


def home_on_node(layout: Layout, state: State, node: SandboxNode) -> str:
    """Return the path of the home folder as programs on the node see it."""
    return HOME_APART if state.isolated else str(layout.home(node))


def device_files(layout: Layout, state: State, node: SandboxNode) -> tuple[str, str]:
    """Return the paths of hccn.conf and hccn_tool as programs on the node see them."""
    # The usual paths: in this mode a node has its own /etc and /usr/local.
    if state.mode == "namespaces":
        return "/etc/hccn.conf", "/usr/local/Ascend/driver/tools/hccn_tool"
    return str(layout.etc(node) / "hccn.conf"), str(layout.tools(node) / "hccn_tool")


def _write_devices(layout: Layout, state: State, node: SandboxNode) -> None:
    conf, _ = device_files(layout, state, node)
    answers = str(Path(conf).with_name("hccn_tool.answers"))
    etc, tools = layout.etc(node), layout.tools(node)
    (etc / "hccn.conf").write_text(sandbox_devices.hccn_conf(node.index, state.devices))
    (etc / "hccn_tool.answers").write_text(sandbox_devices.answers(node.index, state.devices))
    _script(tools / "hccn_tool", sandbox_devices.hccn_tool(conf, answers, state.devices))
    _script(tools / "npu-smi", sandbox_devices.npu_smi(node.index, state.devices, answers))


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def make_keys(layout: Layout, nodes: tuple[SandboxNode, ...]) -> dict[str, str]:
    """Make a key pair for the user and for each node; return the public host keys."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    def make(path: Path, comment: str) -> str:
        pair = Ed25519PrivateKey.generate()
        private = pair.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        public = pair.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        replace_file(path, private, 0o600)
        replace_file(path.with_suffix(".pub"), f"{public.decode()} {comment}\n")
        return public.decode()

    replace_file(layout.authorized_keys, make(layout.key, "clusterctl-sandbox") + "\n", 0o600)
    return {node.name: make(layout.host_key(node), node.name) for node in nodes}


def write_inventory(layout: Layout, state: State, host_keys: dict[str, str]) -> None:
    """Write cluster.yaml and known_hosts, once every port is known."""
    known = "".join(f"[{node.host}]:{node.port} {host_keys[node.name]}\n" for node in state.nodes)
    replace_file(layout.known_hosts, known, 0o600)
    defaults = {
        "user": state.user,
        "key": "./keys/id_ed25519",
        "python": state.python,
        "devices": state.devices,
        "kind": "cpu",
    }
    lines = [
        "# written by clusterctl sandbox up",
        "name: sandbox",
        "known_hosts: ./known_hosts  # the host keys of the nodes",
        f"defaults: {json.dumps(defaults)}",
        "nodes:",
        *(f"  {node.name}: {json.dumps(_entry(layout, state, node))}" for node in state.nodes),
    ]
    replace_file(layout.cluster_file, "\n".join(lines) + "\n", 0o600)


def _entry(layout: Layout, state: State, node: SandboxNode) -> dict[str, object]:
    conf, tool = device_files(layout, state, node)
    return {
        "host": node.host,
        "port": node.port,
        "address": node.address,
        "interface": node.interface,
        "server_id": node.name,
        "workdir": f"{home_on_node(layout, state, node)}/.clusterctl",
        "hccn_conf": conf,
        "hccn_tool": tool,
    }
