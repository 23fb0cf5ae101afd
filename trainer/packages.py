"""Turn the import of a package that is not installed into an error that says how to install it."""

from __future__ import annotations

from trainer.env import install_command
from trainer.errors import InputError

EXTRA_OF = {
    **dict.fromkeys(("torch", "deepspeed", "tokenizers", "safetensors", "numpy", "jinja2"), "train"),
    "aiohttp": "serve",
    **dict.fromkeys(("pyarrow", "zstandard", "fasttext"), "data"),
}


def missing_package(error: ImportError) -> InputError | None:
    """Return the error for a package of an extra that is not installed; None for a module of our own, a bug."""
    name = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(name)
    return InputError(f"{name} is not installed here", install_command(extra)) if extra else None
