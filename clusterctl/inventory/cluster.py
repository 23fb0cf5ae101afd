"""Read cluster.yaml into a Cluster: the nodes, how to reach them, and their devices."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterctl.document import Document, Section, load_document, parse_document, reader, take_env
from clusterctl.errors import Collected, Fault, InputFaults, UsageError, did_you_mean
from clusterctl.inventory.addresses import address_fault, host_and_port, same_place
from clusterctl.inventory.container import ContainerOptions
from clusterctl.inventory.setup import Setup, take_setup
from clusterctl.wire.fields import Key, own, setting, shown

KINDS = ("cpu", "cuda", "npu")
MAX_DEVICES = 64
# Limit of nodes; so many are read in one second. The largest known clusters have half as many.
MAX_NODES = 50_000
# Limit of the names in all groups together.
MAX_GROUPED = 1_000_000
# A name, an IPv4 address, or an IPv6 address with a zone; never an option or shell text.
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:%-]*\Z")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9._@\\-]*\Z")
# One hop: `host`, `user@host:22`, `[::1]:22`, or a name of ~/.ssh/config.
GATEWAY = re.compile(
    r"(ssh://)?([A-Za-z_][A-Za-z0-9._@\\-]*@)?([A-Za-z0-9_][A-Za-z0-9._:%-]*|\[[0-9A-Fa-f:.%A-Za-z-]+\](:\d{1,5})?)\Z"
)


SIZE = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) ?(?P<unit>[MGT]i?B)", re.IGNORECASE)
UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}


def read_devices(value: object) -> tuple[int, ...]:
    """Return the devices of an entry of a file; raise ValueError with the remedy."""
    try:
        return parse_devices(value)
    except UsageError as error:
        raise ValueError(error.message, error.hint) from None


def _addresses(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list of addresses", "as in [192.168.10.21, 192.168.10.22]")
    for address in value:
        try:
            ipaddress.ip_address(str(address))
        except ValueError:
            raise ValueError(f"{address!r} is not an address", "as in 192.168.10.21") from None
    return tuple(str(address) for address in value)


def _host(value: object) -> str:
    if value == "" or not isinstance(value, (str, int, float)):
        raise ValueError(
            "is empty" if value == "" else f"must be text, not {shown(value)}",
            "leave it out if the name of the node is its address",
        )
    return str(value)


@dataclass(frozen=True)
class Node:
    """One machine that is reached over SSH."""

    name: str = own()
    host: str = setting(read=_host)
    """Host name or address for SSH; `local` is this machine, without SSH. Default: the name of the node."""
    address: str = setting()
    """Address that the other nodes and the ranks use. Default: `host`; 127.0.0.1 if `local` is the only node."""
    port: int = setting(22, least=1, most=65535)
    """Port of SSH."""
    user: str | None = setting(None)
    """Login name. Default: as SSH chooses."""
    key: str | None = setting(None)
    """Identity file (private key). Default: as SSH chooses."""
    gateway: str | None = setting(None)
    """Jump host: `user@host:port`."""
    python: str = setting("python3")
    """Python of the agent and of the ranks on the node."""
    workdir: str = setting(
        "~/.clusterctl",
        pattern=re.compile("~|~?/.*"),
        noun="a full path in this login's home",
        example="as in /scratch/x or ~/x",
    )
    """Folder on the node for code, data and runs."""
    devices: tuple[int, ...] = setting((), read=read_devices)
    """Device ids: a number (8), a half-open range ("[0,8)") or a list. Default: the node is asked; for `cpu` one."""
    kind: str = setting("cpu", choices=KINDS, example="cpu, cuda (NVIDIA GPUs) or npu (Ascend)")
    """Kind of the devices: cpu, cuda (NVIDIA GPUs) or npu (Ascend). Default: cpu, or with no `devices` the node's."""
    server_id: str = setting("")
    """Name of this node in a rank table. Default: `address`."""
    device_ips: tuple[str, ...] = setting((), read=_addresses)
    """Network addresses of the devices, in order. Default: from hccn_tool or hccn.conf on the node."""
    super_pod: str = setting("")
    """A3 only: id of the super pod in a rank table. Default: from npu-smi on the node."""
    hccn_tool: str | None = setting(None)
    """Path of hccn_tool on the node. Default: searched in the usual folders."""
    hccn_conf: str | None = setting(None)
    """Path of hccn.conf on the node. Default: /etc/hccn.conf."""
    interface: str | None = setting(None)
    """Network interface between the nodes; set for gloo, NCCL and HCCL."""
    env: dict[str, str] = setting(factory=dict, take=take_env)
    """Environment variables of the ranks on this node."""
    setup: Setup | None = setting(None, take=take_setup)
    """What the shell runs before ranks start: a file to source, commands, or {source, modules, venv, run}."""
    container: ContainerOptions | None = setting(None)
    """The container that the ranks of this node run in, with the keys of a job's `container`. Default: the job's."""
    disk: str | None = setting(None, pattern=SIZE, noun="a size", example="as in 500GB, 2TB or 1.5TiB")
    """Space for checkpoints, such as 500GB: `plan` refuses a training that needs more. Default: no limit."""
    allocation: str = own("")
    """The batch system and the number of its job that holds this node, as in `name:17`. An allocation sets it."""
    unnamed: tuple[str, ...] = own((), compare=False)
    """Those of `kind` and `devices` that the inventory does not name."""

    @property
    def is_asked(self) -> bool:
        """Return whether a start asks the node for its devices, because the inventory does not name them."""
        return "devices" in self.unnamed


@dataclass(frozen=True)
class Cluster:
    """The nodes of an inventory in order, with their groups."""

    name: str
    """Name of the cluster. Default: the name of the file."""
    nodes: tuple[Node, ...]
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Named node sets, used as `@name`."""
    known_hosts: str | None = None
    """File with the host keys of the nodes, relative to this file. Default: ~/.ssh/known_hosts."""
    source: str = ""
    # Whether the kind of the devices is a guess: neither the hostfile nor the user named it.
    assumed: bool = False

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise UsageError(
            f"{self.source}: no node {name!r}", did_you_mean(name, self.names) or "see `clusterctl nodes`"
        )

    def select(self, expression: str | None, exclude: str | None = None) -> Cluster:
        """Return the nodes of a node set in the order of the inventory; raise UsageError for none or unknown ones."""
        from clusterctl.inventory import nodeset

        errors = Collected()
        with errors:
            chosen = nodeset.select(expression or "*", self.names, self.groups)
        with errors:
            dropped = set(nodeset.select(exclude, self.names, self.groups)) if exclude else set()
        errors.raise_all()
        wanted = set(chosen) - dropped
        if not wanted:
            raise UsageError(
                f"{expression or 'all'!r} without {exclude!r} matches no node", "see `clusterctl nodes`"
            )
        return replace(self, nodes=tuple(node for node in self.nodes if node.name in wanted))


def load(path: Path) -> Cluster:
    """Read and check an inventory; raise InputFaults with all of its faults."""
    return _read(load_document(path), path)


def parse(text: str, path: Path) -> Cluster:
    """Check the text of an inventory at `path`; raise InputFaults with all of its faults."""
    return _read(parse_document(text, str(path)), path)


def _read(document: Document, path: Path) -> Cluster:
    top = Section(document)
    top.taken.append("defaults")
    defaults = top.value.get("defaults") or {}
    cluster = Cluster(
        name=top.take_text("name", path.stem),
        nodes=tuple(_nodes(document, top, defaults)),
        groups=_groups(document, top),
        known_hosts=_beside(path, top.take("known_hosts", str)),
        source=str(path),
    )
    top.done()
    cluster = replace(cluster, nodes=tuple(_with_paths(node, path) for node in cluster.nodes))
    if len(cluster.nodes) == 1:
        cluster = replace(cluster, nodes=(_alone(cluster.nodes[0]),))
    faults = top.faults + _cross_faults(document, cluster)
    if faults:
        raise InputFaults(
            faults, f"correct {path} and try again; `clusterctl init` writes a commented example"
        )
    return cluster


def _nodes(document: Document, top: Section, defaults: object) -> Iterable[Node]:
    from clusterctl.inventory import nodeset

    top.taken.append("nodes")
    given = top.value.get("nodes")
    if not given:
        top.fault("nodes", "lists no nodes", "nodes: {node1: {host: 10.0.0.1}}")
        return
    if not isinstance(given, (dict, list)):
        top.fault("nodes", "must be a mapping or a list", "nodes: {node1: {host: 10.0.0.1}}")
        return
    checked = reader(document, top.faults)
    shared = checked.given(Node, defaults, ("defaults",)) or {}
    _require_paths(document, ("defaults",), shared, top.faults)
    items: list[tuple[str, Any]] = (
        list(given.items()) if isinstance(given, dict) else [(str(name), None) for name in given]
    )
    count = 0
    for position, (pattern, details) in enumerate(items):
        key: Key = ("nodes", pattern if isinstance(given, dict) else position)
        try:
            names = nodeset.expand(pattern)
        except UsageError as error:
            top.faults.append(document.fault(key, error.message, error.hint))
            continue
        if not names:
            top.faults.append(document.fault(key, f"{pattern[:80]!r} lists no nodes", "as in node[1-4]"))
        count += len(names)
        if count > MAX_NODES:
            top.faults.append(document.fault(key, f"more than {MAX_NODES:,} nodes", "a shorter range"))
            return
        own_values = checked.given(Node, details or {}, key) or {}
        _require_paths(document, key, own_values, top.faults)
        for name in names:
            yield _node(name, {**shared, **own_values})


def _require_paths(document: Document, key: Key, values: dict[str, Any], faults: list[Fault]) -> None:
    """Record the files to source that are no files of a node."""
    setup = values.get("setup")
    for path in setup.relative if setup is not None else ():
        problem, remedy = f"{path!r} is not an absolute path", "name a file of the node: /path or ~/path"
        faults.append(document.fault((*key, "setup"), problem, remedy))


def bytes_of(text: str) -> float:
    """Return the bytes in a size such as 500GB; 0 for another text."""
    found = SIZE.fullmatch(text.strip())
    return float(found["number"]) * UNITS[found["unit"].upper()] if found else 0.0


def _fill(text: str, name: str | None) -> str:
    """Replace `{n}` by the number at the end of the node's name, and `{node}` by the name."""
    if name is None or "{" not in text:
        return text
    digits = re.search(r"(\d+)\D*\Z", name)
    return text.replace("{node}", name).replace("{n}", str(int(digits.group(1))) if digits else "")


def _node(name: str, found: dict[str, Any]) -> Node:
    host = found.get("host") or name
    address = found.get("address") or host
    filled: dict[str, Any] = {
        key: _fill(value, name) if isinstance(value, str) else value for key, value in found.items()
    }
    filled.update(host=_fill(host, name), address=_fill(address, name))
    filled.setdefault("server_id", filled["address"])
    unnamed = tuple(key for key in ("kind", "devices") if key not in filled)
    if filled.get("kind", "cpu") == "cpu":
        # A node without any devices in the inventory gets one rank.
        filled.setdefault("devices", (0,))
    # A node that is said to have only CPUs has nothing to tell.
    return Node(name=name, unnamed=unnamed if filled.get("kind") != "cpu" else (), **filled)


def _alone(node: Node) -> Node:
    """Return the only node of a cluster: without an address of its own, only this machine reaches it."""
    if node.host != "local" or node.address != "local":
        return node
    own = "127.0.0.1"
    return replace(node, address=own, server_id=own if node.server_id == "local" else node.server_id)


def parse_devices(value: object) -> tuple[int, ...]:
    """Return device ids from a count, a half-open range or a list; the ambiguous text `[0,8]` is refused."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= MAX_DEVICES:
            raise UsageError(f"{value} devices", f"0 to {MAX_DEVICES}")
        ids: Sequence[Any] = range(value)
    elif isinstance(value, str):
        ids = _device_text(value)
    elif isinstance(value, list):
        ids = value
    else:
        raise UsageError(
            f"{value!r} is not a choice of devices",
            'a count (8), a half-open range ("[0,8)") or a list ("0,1")',
        )
    bad = [
        each
        for each in ids
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < MAX_DEVICES
    ]
    if bad or len(set(ids)) != len(ids):
        raise UsageError(
            f"{value!r}: device ids must be different whole numbers from 0 to {MAX_DEVICES - 1}",
            "as in [0, 1, 2, 3]",
        )
    return tuple(ids)


def named_devices(text: str) -> tuple[int, ...]:
    """Return the devices in a command-line option, where a number alone is a count."""
    return parse_devices(int(text) if re.fullmatch(r"[0-9]{1,3}", text) else text)


def _device_text(text: str) -> Sequence[int]:
    half_open = re.fullmatch(r"\[\s*([0-9]{1,3})\s*,\s*([0-9]{1,3})\s*\)", text)
    if half_open:
        first, end = int(half_open[1]), int(half_open[2])
        if first >= end:
            raise UsageError(f"{text} is empty", f"[{first},{first + 1}) is device {first} alone")
        return range(first, end)
    closed = re.fullmatch(r"\[\s*([0-9]{1,3})\s*,\s*([0-9]{1,3})\s*\]", text)
    if closed:
        low, last = closed[1], closed[2]
        with_last = f'"[{low},{int(last) + 1})" includes {last}'
        hint = f'"[{low},{last})" excludes {last}, {with_last}, and a list without quotes is two devices'
        raise UsageError(f"{text} is read differently by different tools", hint)
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", text):
        return [int(part) for part in text.split(",")]
    raise UsageError(
        f"{text!r} is not a choice of devices", 'a count (8), a half-open range ("[0,8)") or a list ("0,1")'
    )


def _groups(document: Document, top: Section) -> dict[str, tuple[str, ...]]:
    from clusterctl.inventory import nodeset

    section = top.section("groups")
    groups: dict[str, tuple[str, ...]] = {}
    left = MAX_GROUPED
    for name in section.value:
        text = section.take_text(name)
        try:
            groups[name] = tuple(nodeset.expand(text, groups))
            left -= len(groups[name])
            if left < 0:
                raise UsageError(f"the groups have more than {MAX_GROUPED:,} names", "shorter ranges")
        except UsageError as error:
            section.fault(name, error.message, error.hint)
            if left < 0:
                break
    return groups


def _beside(path: Path, name: str | None) -> str | None:
    """Return a path of the inventory: relative to its file, with `~` as the user's home."""
    if name is None:
        return None
    expanded = Path(name).expanduser()
    return str(expanded if expanded.is_absolute() else (path.parent / expanded).resolve())


def _with_paths(node: Node, path: Path) -> Node:
    return replace(node, key=_beside(path, node.key))


def _cross_faults(document: Document, cluster: Cluster) -> list[Fault]:
    """Return the faults that only show when all nodes are compared."""
    faults: list[Fault] = []
    seen_name: dict[str, str] = {}
    seen_at: dict[tuple[str, int], str] = {}
    for node in cluster.nodes:
        here: tuple[str | int, ...] = ("nodes", node.name)
        if node.name in seen_name:
            faults.append(document.fault(here, f"the node {node.name} is listed twice", "keep one of them"))
        at = (same_place(node.host), node.port)
        if at in seen_at and node.name not in seen_name:
            problem = f"{node.name} and {seen_at[at]} are both at {node.host}:{node.port}"
            faults.append(document.fault(here, problem, "a machine is one node"))
        seen_name[node.name] = node.name
        seen_at.setdefault(at, node.name)
        faults += _node_faults(document, here, node)
    known = set(cluster.names)
    for group, names in cluster.groups.items():
        unknown = [name for name in names if name not in known]
        if unknown:
            problem = f"the group has {', '.join(unknown[:5])}, which the inventory does not have"
            faults.append(document.fault(("groups", group), problem, did_you_mean(unknown[0], sorted(known))))
    return faults


def _is_own_place(hop: str, node: Node) -> bool:
    """Return whether a hop on the way to a node is the node's own SSH server."""
    host, port = host_and_port(hop.removeprefix("ssh://").rpartition("@")[2])
    return same_place(host) == same_place(node.host) and (port or 22) == node.port


def _node_faults(document: Document, here: tuple[str | int, ...], node: Node) -> Iterable[Fault]:
    for key, value, pattern in (
        ("host", node.host, HOST),
        # Without an address of its own, a node has its host's.
        ("address", node.address if node.address != node.host else None, HOST),
        ("user", node.user, USER),
    ):
        if value is not None and not pattern.match(value):
            article, remedy = ("an" if key == "address" else "a"), "letters, digits, '.', '-' and ':' only"
            if pattern is USER:
                remedy = "a letter or _ first, then letters, digits, '.', '_', '-' and '@'"
            yield document.fault((*here, key), f"{value!r} can't be {article} {key}", remedy)
        elif value is not None and pattern is HOST and (fault := address_fault(value)):
            yield document.fault((*here, key), fault, "as in 10.0.0.1 or fd00::1, or a name")
    for hop in (node.gateway or "").split(","):
        if hop.strip() and not GATEWAY.match(hop.strip()):
            yield document.fault((*here, "gateway"), f"{hop!r} can't be a gateway", "as in user@bastion:22")
        elif _is_own_place(hop.strip(), node):
            problem = f"{hop.strip()!r} is {node.name} itself, which can't be its own gateway"
            yield document.fault(
                (*here, "gateway"), problem, "gateway: '' for this node, or the machine in between"
            )
    if node.key is not None and not Path(node.key).is_file():
        yield document.fault(
            (*here, "key"), f"no identity file {node.key}", "name the private key, as in ~/.ssh/id_ed25519"
        )
    if node.device_ips and len(node.device_ips) != len(node.devices):
        problem = f"{len(node.device_ips)} device_ips for {len(node.devices)} devices"
        yield document.fault((*here, "device_ips"), problem, "one address for each device, in the same order")
