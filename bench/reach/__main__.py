"""Compare clusterctl with pdsh, clush, pdcp, rsync, scp and tar over ssh, on the same real sshd nodes in one run.

    python -m bench.reach                                  every row: over an hour on two cores; needs root
    python -m bench.reach exec lines --nodes 64            some rows
    python -m bench.reach --quick                          every row in small sizes, to see that it works
    python -m bench.reach exec --json reach.json           also writes every sample

Rows: exec (cold, warm, ten in a row), push, uplink, small, lines, logs, memory, launch, storm, model. The tools take
turns. A figure is the median of the runs; `x ours` is the wall time divided by clusterctl's. Missing tools are listed.
The nodes are namespaces on this machine and share its cores with the launcher: compare ratios, not seconds, and measure
on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import fields
from pathlib import Path

from bench.field import end_by_signal, log
from bench.reach.field import field
from bench.reach.figures import Measured
from bench.reach.launches import missed
from bench.reach.launches import report as launch_report
from bench.reach.model import model_of, report
from bench.reach.rows import OURS, Bench, Sizes

ROWS = ("exec", "push", "uplink", "small", "lines", "logs", "memory", "launch", "storm", "model")
HELP = {
    "nodes": "for exec, memory and launch;",
    "runs": "of each tool;",
    "uplink_runs": "of the peers with a slow uplink;",
    "megabytes": "of the one large file;",
}
QUICK = {
    "nodes": (6,), "push_nodes": 4, "small_nodes": (3,), "uplink_nodes": 4, "line_nodes": 3, "storm_nodes": 24,
    "model_nodes": (2, 4, 8), "runs": 1, "storm_runs": 1, "megabytes": 8, "files": 200, "lines": 5000,
}  # fmt: skip


def targets(nodes: int) -> list[tuple[str, int, str, str, float]]:
    """Return the targets for exec on this number of nodes.

    A target is (row, number of nodes or 0 for any number, clusterctl's variant, start of the peers' names, largest
    allowed ratio of clusterctl's time to the best peer's).
    """
    if nodes <= 16:
        return [("exec, cold", nodes, OURS, "pdsh -f", 1.2)]
    cold = 0.75 if nodes <= 64 else 0.65
    return [
        ("exec, cold", nodes, OURS, "", cold),
        ("exec, cold", nodes, OURS, "pdsh, stock", 0.25),
        ("exec, warm", nodes, f"{OURS} --persist", "pdsh over ControlMasters", 0.4),
    ]


TARGETS = [
    ("ten commands", 0, f"{OURS}, connected", "ten pdsh", 0.05),
    ("push, one file", 0, OURS, "clush --copy, stock", 0.5),
    ("push, one file", 0, OURS, "clush --copy", 0.5),
    ("push, one file", 0, f"{OURS} --relay plain", "clush --copy, stock", 0.25),
    ("push, one file", 0, f"{OURS} --relay plain", "clush --copy", 0.25),
    ("push, uplink 200mbit", 0, OURS, "", 0.12),
    ("small files, cold", 0, OURS, "tar over ssh", 0.8),
    ("small files, unchanged", 0, OURS, "rsync", 0.6),
    ("lines", 0, OURS, "pdsh", 1 / 3),
    ("logs", 0, OURS, "", 1.0),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all by default")
    for size in fields(Sizes):
        several = "+" if isinstance(size.default, tuple) else None
        text = f"{HELP.get(size.name, '')} {size.default}".replace("%", "%%")
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=int, nargs=several, help=text)
    parser.add_argument("--quick", action="store_true", help="small sizes, one run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample there")
    options = parser.parse_args()
    unknown = [row for row in options.rows if row not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    given = {size.name: vars(options)[size.name] for size in fields(Sizes) if vars(options)[size.name]}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    rows = options.rows or list(ROWS)
    end_by_signal()
    sizes = Sizes(**{**(QUICK if options.quick else {}), **given})
    found = measured(rows, sizes, options.json)
    return int(any(entry.failed for entry in found if entry.tool.startswith(OURS)))


def measured(rows: list[str], sizes: Sizes, out: Path | None) -> list[Measured]:
    """Measure every row on the same nodes and print each row when it is complete."""
    found: list[Measured] = []
    log(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start")
    with field(most(rows, sizes)) as site:
        bench = Bench(site, sizes, log)
        for row in rows:
            log(f"{row}, load {os.getloadavg()[0]:.1f}")
            these = list(getattr(bench, row)())
            found += these
            print(table(these), flush=True)
            if out:
                out.write_text(json.dumps([entry.value() for entry in found], indent=1) + "\n")
    if bench.launches.started:
        print(launch_report(bench.launches.started, bench.launches.idle))
        print("\n".join(missed(bench.launches.started, bench.launches.idle)))
    if len(bench.points) > 1:
        print(report(bench.points, model_of(bench.points, os.cpu_count() or 1)))
    print(judged(found, sizes))
    return found


def most(rows: list[str], sizes: Sizes) -> int:
    """Return how many nodes these rows need."""
    needs = {
        "exec": max(sizes.nodes), "push": sizes.push_nodes, "uplink": sizes.uplink_nodes,
        "small": max(sizes.small_nodes), "lines": sizes.line_nodes, "logs": sizes.line_nodes,
        "memory": max(sizes.nodes), "launch": max(sizes.nodes),
        "storm": sizes.storm_nodes, "model": max(sizes.model_nodes),
    }  # fmt: skip
    return max(needs[row] for row in rows)


def table(found: list[Measured]) -> str:
    """Return a table with one line per tool, clusterctl first, and each peer's time as a multiple of clusterctl's."""
    lines = [
        f"{'row':<24}{'nodes':>6}  {'tool':<40}{'wall s':>9}{'spread':>15}{'cpu s':>8}{'failed':>7}{'x ours':>8}"
    ]
    for row in found:
        head = f"{row.row:<24}{row.nodes:>6}  {row.tool:<40}"
        if row.missing:
            lines.append(f"{head} not measured: {row.missing}")
        elif row.wall == 0:
            lines.append(f"{head} {row.note}")
        else:
            walls = [sample.wall for sample in row.samples]
            ours = next((other for other in found if same(other, row) and other.samples), None)
            times = f"{row.wall / ours.wall:.2f}" if ours and ours.wall else ""
            spread = f"{min(walls):.2f}-{max(walls):.2f}"
            lines.append(
                f"{head}{row.wall:>9.3f}{spread:>15}{row.cpu:>8.2f}{row.failed:>7}{times:>8}  {row.note}"
            )
    return "\n".join(lines)


def same(ours: Measured, peer: Measured) -> bool:
    """Return whether `ours` is clusterctl's result for the same row and number of nodes as `peer`."""
    return ours.tool.startswith(OURS) and (ours.row, ours.nodes) == (peer.row, peer.nodes)


def judged(found: list[Measured], sizes: Sizes) -> str:
    """Return each target with the ratio reached, compared with the best peer that worked on all nodes."""
    lines = ["ours / the best peer:"]
    wanted = [target for nodes in sizes.nodes for target in targets(nodes)] + TARGETS
    for row, nodes, tool, peers, limit in wanted:
        for ours in found:
            if ours.row != row or ours.tool != tool or not ours.samples or (nodes and ours.nodes != nodes):
                continue
            rivals = [
                rival for rival in found
                if (rival.row, rival.nodes) == (row, ours.nodes) and rival.samples and not rival.failed
                and not rival.tool.startswith(OURS) and rival.tool.startswith(peers)
            ]  # fmt: skip
            if not rivals:
                lines.append(f"  {row}, {ours.nodes} nodes: {tool}: no peer to compare with")
                continue
            best = min(rivals, key=lambda rival: rival.wall)
            ratio = ours.wall / best.wall
            word = "reached" if ratio <= limit else "not reached"
            failed = f"; {ours.failed} failures" if ours.failed else ""
            lines.append(
                f"  {row}, {ours.nodes} nodes: {tool} {ratio:.2f} of {best.tool}; at most {limit:.2f}: {word}{failed}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
