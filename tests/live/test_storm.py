"""Many nodes that are one sshd, which drops logins once too many are under way: all of them succeed."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clusterctl.sandbox import sshd as sandbox_sshd
from clusterctl.sandbox.cluster import load as load_sandbox
from tests.live.conftest import Shell

pytestmark = pytest.mark.live


@dataclass(frozen=True)
class OneSshd:
    """An inventory of many nodes, all of them this daemon at different addresses of the loopback."""

    inventory: Path
    log: Path

    def dropped(self) -> int:
        return len(re.findall(r"drop connection|past MaxStartups", self.log.read_text(errors="replace")))


@pytest.fixture
def one_sshd(tmp_path: Path, cluster_file: Path) -> Iterator[Callable[[int, str], OneSshd]]:
    sshd = sandbox_sshd.find_sshd()
    made = load_sandbox(cluster_file.parent)
    if sshd is None or made.mode != "loopback" or not Path("/proc/self").exists():
        pytest.skip("it needs sshd, and Linux, where all of 127/8 is this machine's")
    started: list[subprocess.Popen[bytes]] = []
    node = made.nodes[0]

    def start(count: int, limit: str) -> OneSshd:
        with socket.create_server(("", 0)) as taken:
            port = taken.getsockname()[1]
        lines = (made.layout.node(node) / "sshd_config").read_text().splitlines()
        out = ("ListenAddress", "AllowUsers", "MaxStartups", "MaxSessions")
        config, log = tmp_path / "sshd_config", tmp_path / "sshd.log"
        config.write_text(
            "\n".join(
                [
                    # Sshd takes 16 addresses, or all.
                    f"ListenAddress 0.0.0.0:{port}",
                    f"AllowUsers {made.state.user}@127.*",
                    "LogLevel VERBOSE",
                    *([f"MaxStartups {limit}"] if limit else []),
                    *(line for line in lines if not line.startswith(out)),
                ]
            )
            + "\n"
        )
        with log.open("wb") as file:
            started.append(subprocess.Popen([sshd, "-D", "-e", "-f", str(config)], stderr=file))
        deadline = time.monotonic() + 20
        while "Server listening" not in log.read_text():
            assert time.monotonic() < deadline and started[-1].poll() is None, log.read_text()
            time.sleep(0.01)
        hosts = [f"{made.layout.loopback}.{100 + number}" for number in range(count)]
        key = made.layout.host_key(node).with_suffix(".pub").read_text()
        (tmp_path / "known_hosts").write_text("".join(f"[{host}]:{port} {key}" for host in hosts))
        shared = {"user": made.state.user, "key": str(made.layout.key), "port": port}
        shared["workdir"] = str(made.layout.home(node) / ".clusterctl")
        nodes = {f"node{number + 1}": {"host": host} for number, host in enumerate(hosts)}
        value = {"known_hosts": str(tmp_path / "known_hosts"), "defaults": shared, "nodes": nodes}
        inventory = tmp_path / "storm.yaml"
        inventory.write_text(json.dumps(value))
        return OneSshd(inventory, log)

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_64_nodes_behind_one_sshd_with_its_stock_limits_all_answer(
    shell: Shell, one_sshd: Callable[[int, str], OneSshd]
) -> None:
    there = one_sshd(64, "")
    done = shell("exec", "-c", str(there.inventory), "all", "--", "echo", "here")
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines())
    assert [line.split() for line in said] == sorted([f"node{number}:", "here"] for number in range(1, 65))


def test_dropped_logins_are_tried_again_until_all_are_in(
    shell: Shell, one_sshd: Callable[[int, str], OneSshd]
) -> None:
    # Whoever comes while three are logging in is dropped.
    there = one_sshd(24, "3:100:3")
    done = shell("exec", "-c", str(there.inventory), "all", "--", "echo", "here")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 24
    assert there.dropped() > 0, "nothing was dropped: this tried nothing"


def test_a_refused_login_is_tried_once(shell: Shell, one_sshd: Callable[[int, str], OneSshd]) -> None:
    there = one_sshd(4, "")
    wrong = shell.folder / "wrong"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(wrong)], check=True)
    value = json.loads(there.inventory.read_text())
    value["defaults"]["key"] = str(wrong)
    there.inventory.write_text(json.dumps(value))
    done = shell("exec", "-c", str(there.inventory), "all", "--", "echo", "here")
    assert done.returncode == 255 and "here" not in done.stdout
    accepted = re.findall(r"Connection from \S+ port", there.log.read_text(errors="replace"))
    assert len(accepted) == 4, there.log.read_text(errors="replace")[-3000:]
