"""Print how large and how entangled the code is: `python -m bench.structure`. tests/test_rules.py has the limits."""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

from tests import test_rules as rules

PRODUCT = (".py", ".cpp", ".h", ".cu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    found = {package: measures(package) for package in (*rules.PACKAGES, "bench")}
    found["all"] = {
        "longest import chain": len(rules.longest_chain()),
        "modules in import circles": len(rules.modules_in_circles()),
        "product lines": sum(lines_of(package) for package in rules.PACKAGES),
    }
    if parser.parse_args().json:
        print(json.dumps(found, indent=2))
        return
    for part, values in found.items():
        for name, value in values.items():
            print(f"{part:<11} {name:<28} {value}")


def measures(package: str) -> dict[str, int | str]:
    """Return the measures of one package."""
    sizes: dict[Path, int] = {}
    for path in rules.sources(package):
        sizes[path.parent] = sizes.get(path.parent, 0) + (path.stem != "__init__")
    largest = max(sizes, key=lambda folder: sizes[folder])
    entries = [
        path for path in (rules.ROOT / package).iterdir() if path.stem not in ("__init__", "__pycache__")
    ]
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in rules.sources(package)
        for node in rules.every_node(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    modules = [len(path.read_text(encoding="utf-8").splitlines()) for path in rules.sources(package)]
    return {
        "lines, without blank ones": lines_of(package),
        "modules": len(modules),
        "longest module, lines": max(modules),
        "functions": len(functions),
        "functions over 60 lines": sum(lines > 60 for lines in functions),
        "longest function, lines": max(functions),
        "folders": len(sizes),
        "largest folder, modules": f"{sizes[largest]} ({rules.named(largest)})",
        "entries at the first level": len(entries),
        "JSON objects": sum(len(rules.json_objects(path)) for path in rules.sources(package)),
    }


def lines_of(package: str) -> int:
    """Return the lines of a package's code that are not blank."""
    files = [path for path in (rules.ROOT / package).rglob("*") if path.suffix in PRODUCT]
    return sum(bool(line.strip()) for path in files for line in path.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main()
