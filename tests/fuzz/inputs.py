"""The seeds of inputs, the functions that mutate them, and what a reader of inputs is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from clusterctl.errors import ClusterctlError

ROOT = Path(__file__).resolve().parents[2]
# The size of the largest input, in bytes.
LONGEST = 4_000


def _device(number: int, rank: int, **more: str) -> dict[str, str]:
    return {
        "device_id": str(number),
        "device_ip": f"192.{number + 1}.27.{rank}",
        **more,
        "rank_id": str(rank),
    }


def tables() -> list[Any]:
    servers = [
        {
            "server_id": f"10.0.0.{at + 1}",
            "device": [_device(n, 2 * at + n) for n in (0, 1)],
            "host_nic_ip": "reserve",
        }
        for at in (0, 1)
    ]
    plain = {"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"}
    pods = [
        {
            "server_id": f"10.0.0.{at + 1}",
            "device": [_device(n, 2 * at + n, super_device_id=str(1000 * at + n)) for n in (0, 1)],
        }
        for at in (0, 1)
    ]
    grouped = {
        "version": "1.2", "server_count": "2", "server_list": pods,
        "super_pod_list": [
            {"super_pod_id": str(at), "server_list": [{"server_id": f"10.0.0.{at + 1}"}]} for at in (0, 1)
        ],
        "status": "completed",
    }  # fmt: skip
    address = {"addr_type": "IPV4", "addr": "223.0.0.10", "ports": ["0/0"]}
    level = {
        "net_layer": 0,
        "net_instance_id": "rack0",
        "net_type": "TOPO",
        "net_attr": "",
        "rank_addr_list": [address],
    }
    flat = {
        "version": "2.0", "rank_count": 1, "status": "completed",
        "rank_list": [{"rank_id": 0, "local_id": 0, "device_id": 0, "level_list": [level]}],
    }  # fmt: skip
    entry = {
        "devices": [{"device_id": "0", "device_ip": "192.1.27.6"}],
        "rank_id": "0",
        "server_id": "10.0.0.1",
    }
    old = {
        "status": "completed", "group_count": "1", "para_plane_nic_location": "device",
        "group_list": [{"group_name": "w", "device_num": "1", "server_num": "1", "instance_count": "1",
                        "instance_list": [entry]}],
    }  # fmt: skip
    files = [json.loads(path.read_text()) for path in sorted((ROOT / "rank_tables").glob("*.json"))]
    return [
        plain,
        grouped,
        flat,
        old,
        {"server_group_list": [plain]},
        *(table for table in files if len(str(table)) < 3000),
    ]


HOSTFILES = (
    "10.0.0.1 slots=8\n10.0.0.2 slots=8\n",
    "# ours\nroot@node2 slots=4 max_slots=8\nnode3 slots=2\n",
    "node1:8\nnode2:4 user=me\nfe80::1\n",
    "node[01-16,20],big\n",
    "SLURM_JOB_NODELIST='n[1-4],m7'\nSLURM_TASKS_PER_NODE='8(x4),4'\n",
    "export SLURM_NODELIST=n1\nSLURM_TASKS_PER_NODE=3\n",
    "node1\nnode2\n",
    "w0@w1:0,2",
)
SETS = (
    "node[1-4,7]", "node[08-11]", "n[0-6/2]", "r[1-2]n[01-02]", "node[1-5]&node[3-9]", "node[1-3]^@old",
    "@both!@new", "*!node[1-2]", "node?", "@*", "@rack[1-2]", "a,b1,10.0.0.[1-2]", "n[98-100],n099",
    "r[1-2]n[1-9]&*5", "n[1-2]-ib[3-4]x", "n[1-999999999]", "all", "n5[8-11]", "n[1-200]m[1-200]",
)  # fmt: skip
CLUSTERS = (
    "name: a\ndefaults: {user: me, kind: npu, devices: 8}\nnodes:\n  node[1-2]: {host: '10.0.0.{n}'}\n"
    "groups: {all2: 'node[1-2]'}\n",
    "nodes:\n  a: {host: 10.0.0.1, port: 22, devices: '[0,4)', env: {A: 1}}\n  b: {host: h2, devices: [1, 0]}\n",
    "nodes: [n1, n2]\n",
    "nodes:\n  n1: &x {host: a, device_ips: [1.1.1.1], devices: 1}\n  n2: {<<: *x, server_id: q}\n",
    '{"nodes": {"n1": {"host": "10.0.0.1"}}}',
)
_LEVEL = '{"net_layer": 0, "net_instance_id": "r{n}", "net_type": "T", "rank_addr_list": [%s]}'
_ADDRESS = '{"addr_type": "IPV4", "addr": "223.0.{n}.%d", "ports": ["0/0"]}'
PLANS = (
    "for: a2\nnodes:\n  node[1-4]:\n    server_id: '10.0.0.{n}'\n    devices: '[0,2)'\n"
    "    device_ips: ['192.1.27.{n+4}', '192.2.27.{2n+4}']\n",
    "for: a3\nnodes:\n  n[1-2]:\n    server_id: '10.0.0.{n}'\n    super_pod: '{n}'\n    devices: [3, 1]\n"
    "    super_device_ids: ['{65536n+7}', '{65536n+5}']\n    device_ips: ['1.1.1.{n}', '1.1.2.{n}']\n",
    "for: a5\nnodes:\n  a[1-2]:\n    local_ids: [0, 1]\n    devices: 2\n    levels:\n"
    + "".join(f"      - [{_LEVEL % (_ADDRESS % place)}]\n" for place in (1, 2)),
    "nodes: {a1: {server_id: '{node}', device_ips: ['::1', 'fd00::{n}']}, b7: {device_ips: ['fd00::1:{n}']}}\n",
    "nodes: {a: {device_ips: ['1.1.1.1,2.2.2.2']}, 'b[08-09/1]': {device_ips: ['1.1.1.{n},2.2.2.{n-5}']}}\n",
)
TOKENS = (
    "[", "]", "{", "}", ",", ":", "!", "&", "^", "@", "*", "?", "-", "/", "%", "#", "=", "\\", '"', "'",
    " ", "\t", "\n", "\r\n", "\x00", "\x1b[2J", "\ufeff", "\u0663", "\u202e", "\xe9", "0", "00", "1-", "-1",
    "[1-", "[]", "[0-9]", "@old", "@*", "slots=", "slots=0", ":0", ":8", "(x4)", "(x999999)",
    "99999999999999999999", "1e999", "NaN", "null", "true", "{}", "[[", "&a ", "*a", "<<: ",
    "!!python/object:os.system ", "--- ", "|", ">", "\\ud800", "\\u0000", "all", "-oProxyCommand=x",
    "$(id)", "`", ";", "%s", "%d", "x" * 70, "[" * 60, "1" * 25, "fe80::1%eth0", "255.255.255.256",
)  # fmt: skip
RAW = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x80")
KEYS = (
    "version", "status", "server_list", "device", "rank_id", "server_id", "device_ip", "super_pod_list",
    "rank_list", "device_id", "super_device_id", "host_ip", "device_port", "level_list", "group_list",
    "\ud800", "", "~/", "\x1b",
)  # fmt: skip


def _odd(random: Random) -> Any:
    """Return a value that is invalid, or barely valid, in most places."""
    deep: Any = random.choice([0, "x"])
    for _ in range(random.choice([1, 8, 31, 33])):
        deep = [deep] if random.random() < 0.5 else {"a": deep}
    return random.choice(
        [
            None, True, False, 0, 1, -1, 10**30, 1.5, float("nan"), float("inf"), "", "0", "00", "-1", "1",
            "2", "16", "65536", "99999999999999999999", "\ud800", "\x00", "x" * 200, "10.0.0.1", "10.0.0.2",
            "::1", "1.1.1.1,2.2.2.2", "010.0.0.1", "1.0", "1.2", "2.0", "1.1", "completed", [], {}, [[]],
            [{}], deep, "\u0663", " 1", "1 ", "+1", "1_0", "fe80::1%0", ",", "1.1.1.1,", "::ffff:1.1.1.1",
        ]
    )  # fmt: skip


def mutate_json(random: Random, seeds: list[str]) -> bytes:
    """Return a JSON document with a few parts replaced, removed, moved, repeated or renamed."""
    value = json.loads(random.choice(seeds))
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        value = _changed(random, value)
    text = json.dumps(value, ensure_ascii=random.random() < 0.9)
    roll = random.random()
    # Repeat a key.
    if roll < 0.1:
        at = text.find('": ', random.randrange(len(text)))
        begin = text.rfind('"', 0, at) if at > 0 else -1
        if begin > 0:
            text = f"{text[:begin]}{text[begin : at + 3]}{json.dumps(_odd(random))}, {text[begin:]}"
    elif roll < 0.2:
        return mutate_text(random, [text])
    return text.encode("utf-8", "surrogatepass")


def _changed(random: Random, value: Any) -> Any:
    """Return the tree with one part changed; the place is found by a random walk from the root."""
    holder, step = None, None
    here = value
    while isinstance(here, (dict, list)) and here and random.random() < 0.85:
        holder, step = here, random.choice(list(here) if isinstance(here, dict) else range(len(here)))
        here = holder[step]
    if holder is None:
        return _odd(random) if random.random() < 0.2 else value
    roll = random.randrange(6)
    if roll == 0:
        del holder[step]
    elif roll == 1 and isinstance(holder, dict):
        holder[random.choice(KEYS)] = here
    elif roll == 2 and isinstance(holder, list):
        holder.insert(random.randrange(len(holder) + 1), here)
    elif roll == 3 and isinstance(holder, list):
        random.shuffle(holder)
    elif roll == 4:
        other = random.choice(list(holder.values()) if isinstance(holder, dict) else holder)
        holder[step] = json.loads(json.dumps(other))
    else:
        holder[step] = _odd(random)
    return value


def mutate_text(random: Random, seeds: list[str]) -> bytes:
    """Return a text with a few cuts, insertions, repetitions, splices and broken bytes."""
    data = random.choice(seeds).encode("utf-8", "surrogatepass")
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 5))):
        size = len(data)
        at = random.randrange(size + 1)
        to = min(size, at + random.choice((1, 1, 2, 4, 16)))
        roll = random.randrange(10)
        if roll < 3:
            data = data[:at] + random.choice(TOKENS).encode() + data[at:]
        elif roll < 5:
            data = data[:at] + random.choice(TOKENS).encode() + data[to:]
        elif roll == 5:
            data = data[:at] + data[to:]
        elif roll == 6:
            data = data[:to] + data[at:to] * random.choice((1, 2, 2, 40)) + data[to:]
        elif roll == 7:
            other = random.choice(seeds).encode("utf-8", "surrogatepass")
            data = data[:at] + other[random.randrange(len(other)) :]
        elif roll == 8:
            data = data[:at] + bytes([random.randrange(256)]) + data[to:]
        else:
            data = data[:at] + random.choice((*RAW, b"\r\n", b"\n", b",")) + data[at:]
    return data[:LONGEST]


def damage(random: Random, seeds: list[bytes]) -> bytes:
    """Return one of the seeds after damage: flipped bits, cuts, overwritten bytes, other types, or deep nesting."""
    data = random.choice(seeds)
    roll = random.randrange(10)
    if roll < 4 and data[:1] in (b"{", b"["):
        with contextlib.suppress(ValueError):
            return mutate_json(random, [data.decode()])
    if roll == 4:
        return data[: random.randrange(len(data) + 1)]
    if roll == 5:
        deep = random.choice((b"[", b'{"a":', b'[{"ranks":')) * random.choice((10, 900, 40_000))
        return deep if random.random() < 0.5 else data[:-2] + b', "deep": ' + deep + data[-2:]
    if roll == 6:
        begin, size = random.randrange(len(data) + 1), random.choice((1, 16, 512))
        return data[:begin] + random.choice((b"\0", b"\xff", b" ", b"\n")) * size + data[begin + size :]
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


@dataclass(frozen=True)
class Reader:
    """A reader under test, with inputs for it and the rules for what it has read."""

    make: Callable[[Random], bytes]
    read: Callable[..., Any]
    """Takes the input, or the folder in which `file` is the input; what it returns goes to `check`."""
    check: Callable[..., object] = lambda value: value
    """Raises if a value breaks a rule; its result is False or None where the reader refused the input quietly."""
    file: str = ""
    refusals: tuple[type[Exception], ...] = (ClusterctlError,)
    """With which exceptions it may refuse an input."""
    own: int = 95
    """How many inputs it gets in a run of all tests."""


def damaged(seeds: list[bytes], *rest: Any, **more: Any) -> Reader:
    """Return a reader whose inputs are damaged seeds."""
    return Reader(lambda random: damage(random, seeds), *rest, **more)


def as_json(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def as_lines(values: list[Any]) -> list[bytes]:
    return ["".join(json.dumps(value) + "\n" for value in values).encode()]
