"""`python -m native`: show which backend each op would use here, and why; `build` compiles the CPU library."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata

from native.compiled.build import BuildFailed, build
from native.memory.torch_pool import serve_torch
from native.registry import OPS, Status, survey


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 for success, 1 if the build failed; argparse exits with 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m native", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["report", "build"], default="report")
    parser.add_argument("--device", default="cpu", help="device type: cpu, cuda, npu (default: cpu)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument(
        "--bounds", action="store_true", help="also show the largest allowed errors; needs torch"
    )
    parser.add_argument("--compiler", default="", help="for build: the command of the C++ compiler")
    options = parser.parse_args(arguments)
    if options.command == "build":
        return _build(options.compiler)
    # The survey imports torch.
    report = as_data(options.device, survey(options.device))
    if options.device == "cpu":
        report["pool"] = {"used": not serve_torch(), "reason": serve_torch()}
    if options.bounds:
        report["bounds"] = bounds()
    print(json.dumps(report, indent=2) if options.json else as_table(report))
    return 0


def bounds() -> list[dict[str, object]]:
    """Return the largest error of value and gradients that each op may have, as a part of the largest value."""
    from native.bounds import ERRORS

    return [
        {"op": op, "type": str(kind).removeprefix("torch."), "value": value, "gradients": gradients}
        for (op, kind), (value, gradients) in ERRORS.items()
    ]


def as_data(device_type: str, statuses: list[Status]) -> dict[str, object]:
    """Return the report for `--json`; `chosen` is null if no backend can run."""
    ops = []
    for op in OPS:
        own = [status for status in statuses if status.op == op]
        ops.append(
            {
                "op": op,
                "chosen": next((status.backend for status in own if status.available), None),
                "backends": [
                    {"backend": status.backend, "available": status.available, "reason": status.reason}
                    for status in own
                ],
            }
        )
    return {"device": device_type, "torch": _torch_version(), "ops": ops}


def as_table(report: dict[str, object]) -> str:
    """Return a table with a row per backend of each op; `*` marks the backend that `auto` chooses."""
    rows = [("op", "backend", "why")]
    for op in report["ops"]:  # type: ignore[attr-defined]
        for backend in op["backends"]:
            mark = "* " if backend["backend"] == op["chosen"] else "  "
            absent = "" if backend["available"] else "not available: "
            rows.append((op["op"], mark + backend["backend"], absent + backend["reason"]))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    head = f"device {report['device']}, torch {report['torch'] or 'not installed'}"
    lines = [head, *(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)]
    if pool := report.get("pool"):
        given = "the pool" if pool["used"] else f"glibc's heap, because {pool['reason']}"  # type: ignore[index]
        lines.append(f"torch's large buffers come from {given}")
    for bound in report.get("bounds", ()):  # type: ignore[attr-defined]
        values = f"value within {bound['value']:.0e}, gradients within {bound['gradients']:.0e}"
        lines.append(f"{bound['op']:<{widths[0]}}  {bound['type']:<{widths[1]}}  {values} of the largest")
    return "\n".join(lines)


def _torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _build(compiler: str) -> int:
    try:
        path = build(compiler=compiler)
    except (BuildFailed, OSError) as error:
        print(f"not built: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
