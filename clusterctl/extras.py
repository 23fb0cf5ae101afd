"""Name the command that installs an extra of this package: of the checkout that runs, or from the index."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from clusterctl.errors import UsageError

# The packages of the extra `train` without which the embedded trainer runs nowhere.
OF_TRAINER = ("torch", "numpy", "tokenizers", "safetensors")
NEXT_TO_US = Path(__file__).resolve().parents[1]


def missing(names: Sequence[str]) -> list[str]:
    """Return which of these packages are not installed here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def command(extra: str) -> str:
    """Return the command that adds an extra, or several with commas, to the Python that runs."""
    is_checkout = (NEXT_TO_US / "pyproject.toml").is_file()
    source = ["-e", str(NEXT_TO_US)] if is_checkout else [str(_installed_from() or "clusterctl")]
    return shlex.join([sys.executable, "-m", "pip", "install", *source[:-1], f"{source[-1]}[{extra}]"])


def require_trainer() -> None:
    """Raise UsageError if a model cannot be loaded on this machine, before its files are fetched."""
    if lacks := missing(OF_TRAINER):
        verb = "is" if len(lacks) == 1 else "are"
        raise UsageError(
            f"{', '.join(lacks)} {verb} not installed here, and a model needs {'it' if verb == 'is' else 'them'}",
            f"{command('train')}\ngenerate, serve and eval also run on a node that has them: --on NODE",
        )


def _installed_from() -> Path | None:
    """Return the folder or wheel from which pip installed this package, if it still exists; None for an index."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        record = distribution("clusterctl").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    address = urlsplit(str(json.loads(record).get("url", ""))) if record else None
    path = Path(unquote(address.path)) if address and address.scheme == "file" else None
    return path if path and path.exists() else None
