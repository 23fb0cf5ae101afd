"""A real Grid Engine over the nodes of a sandbox with networks of their own; node1 is the master and the login node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clusterctl.sandbox import cluster, namespaces

ROOT = Path(__file__).resolve().parents[2]
MASTER, EXECD = "/usr/sbin/sge_qmaster", "/usr/sbin/sge_execd"
HOSTS = ("node1", "node2")
MAKE = r"""
set -e
mkdir -p $SGE_ROOT/default/common $SGE_ROOT/spool/qmaster $SGE_ROOT/spool/execd $SGE_ROOT/spool/db
for name in bin lib util utilbin; do ln -s /var/lib/gridengine/$name $SGE_ROOT/$name; done
sed "s#/var/spool/gridengine/spooldb#$SGE_ROOT/spool/db#; s#/var/spool/gridengine/qmaster#$SGE_ROOT/spool/qmaster#
     s#sgeadmin#root#" /usr/share/gridengine/default-bootstrap > $SGE_ROOT/default/common/bootstrap
echo node1 > $SGE_ROOT/default/common/act_qmaster
/usr/lib/gridengine/spoolinit berkeleydb libspoolb $SGE_ROOT/spool/db init
sed "s#^execd_spool_dir .*#execd_spool_dir $SGE_ROOT/spool/execd#; s/^min_uid .*/min_uid 0/; s/^min_gid .*/min_gid 0/
     s/^load_report_time .*/load_report_time 00:00:02/" /usr/share/gridengine/default-configuration > $SGE_ROOT/conf
/usr/lib/gridengine/spooldefaults configuration $SGE_ROOT/conf
/usr/lib/gridengine/spooldefaults complexes /usr/share/gridengine/util/resources/centry
/usr/lib/gridengine/spooldefaults usersets /usr/share/gridengine/util/resources/usersets
/usr/lib/gridengine/spooldefaults managers root
SGE_ND=1 setsid sge_qmaster > $SGE_ROOT/qmaster.log 2>&1 < /dev/null &
echo $! > $SGE_ROOT/qmaster.pid
for try in $(seq 100); do qconf -sh > /dev/null 2>&1 && break; sleep 0.2; done
cd $SGE_ROOT
for host in node1 node2; do qconf -ah $host || true; qconf -as $host || true; done
printf 'group_name @allhosts\nhostlist node1 node2\n' > group
qconf -Ahgrp group
printf '%s\n' 'pe_name mpi' 'slots 999' 'user_lists NONE' 'xuser_lists NONE' 'start_proc_args /bin/true' \
    'stop_proc_args /bin/true' 'allocation_rule 2' 'control_slaves TRUE' 'job_is_first_task FALSE' \
    'urgency_slots min' 'accounting_summary TRUE' 'qsort_args NONE' > pe
qconf -Ap pe
printf '%s\n' '#!/bin/sh' "sed -i 's/^hostlist .*/hostlist @allhosts/; s/^pe_list .*/pe_list mpi/; s/^slots .*/slots 2/
    s/^rerun .*/rerun TRUE/; s/^notify .*/notify 00:00:10/; s/^load_thresholds .*/load_thresholds NONE/' \$1" > editor
chmod +x editor
EDITOR=$SGE_ROOT/editor qconf -aq all.q
qconf -ssconf | sed 's/^schedule_interval .*/schedule_interval 0:0:1/; s/^flush_submit_sec .*/flush_submit_sec 1/
    s/^flush_finish_sec .*/flush_finish_sec 1/' > scheduler
qconf -Msconf scheduler
"""
START = """SGE_ND=1 setsid sge_execd > $SGE_ROOT/execd.$(hostname).log 2>&1 < /dev/null &
echo $! > $SGE_ROOT/$(hostname).pid"""
END = "for file in $SGE_ROOT/*.pid; do kill -TERM $(cat $file) 2> /dev/null || true; done; sleep 1"


def why_not() -> str:
    """Return what this machine lacks for a Grid Engine, or ""."""
    if os.getuid():
        return "its daemons need root"
    missing = [name for name in (MASTER, EXECD, "/usr/bin/qsub") if not Path(name).exists()]
    packages = "packages gridengine-master, gridengine-exec and gridengine-client"
    return f"not installed: {', '.join(missing)} ({packages})" if missing else namespaces.why_not()


class GridEngine:
    """Runs shell lines on the login node, in a project on the disk of all nodes."""

    def __init__(self, made: cluster.Sandbox) -> None:
        self.made = made
        self.folder = made.directory / "shared"
        (self.folder / "home").mkdir(parents=True)
        (self.folder / "clusterctl.yaml").write_text("runs: runs\n")
        self.inventory = made.directory / "cluster.yaml"
        variables = {"SGE_ROOT": self.folder / "sge", "SGE_CELL": "default", "HOME": self.folder / "home"}
        variables |= {"PYTHONPATH": ROOT, "SGE_QMASTER_PORT": 6444, "SGE_EXECD_PORT": 6445, "NO_COLOR": 1}
        assigned = " ".join(f"{name}={value}" for name, value in variables.items())
        self.before = f"export {assigned}; cd {self.folder}; C='{sys.executable} -m clusterctl'\n"

    def __call__(
        self, lines: str, *, node: str = "node1", timeout: float = 200
    ) -> subprocess.CompletedProcess[str]:
        """Run shell lines on a node."""
        ask = [sys.executable, "-m", "clusterctl", "ssh", "-c", str(self.inventory), node, "--"]
        return subprocess.run(
            [*ask, self.before + lines],
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    def wait(self, run: str, phase: str, seconds: float) -> str:
        """Wait until `status` shows a phase of a run; return what it shows."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self(f"$C status {run}").stdout
            if f"  {phase}" in shown.split("\n", 1)[0]:
                return shown
            log = self.folder / "runs" / run / "sge.log"
            assert time.monotonic() < deadline, shown + (log.read_text() if log.exists() else "")
            time.sleep(1)


@contextmanager
def grid_engine(directory: Path) -> Iterator[GridEngine]:
    """Yield a Grid Engine of two nodes with two slots each."""
    made = cluster.up(directory, nodes=len(HOSTS), devices=2, mode="namespaces")
    try:
        found = GridEngine(made)
        done = found(MAKE)
        assert done.returncode == 0, done.stdout + done.stderr
        for node in HOSTS:
            found(START, node=node)
        yield found
    finally:
        found(END)
        made.down()
        shutil.rmtree(directory, ignore_errors=True)
