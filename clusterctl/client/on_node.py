"""Call one function on a node. This file is pushed with the pickled call; it needs only Python 3.8 or newer."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import traceback
from typing import Any


def main() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(folder, "call.json"), encoding="utf-8") as file:
        call = json.load(file)
    if call["python"] and call["python"] != list(sys.version_info[:2]):
        wanted = ".".join(map(str, call["python"]))
        sys.exit(
            f"error: the function was sent as Python {wanted} bytecode, and this node runs Python "
            f"{sys.version_info[0]}.{sys.version_info[1]}; use the same version, or put the function into a module "
            "below `code`"
        )
    results = os.path.join(os.environ["CLUSTERCTL_RUN_DIR"], call["results"])
    path = os.path.join(results, f"attempt-{os.environ['CLUSTERCTL_ATTEMPT']}-rank-{os.environ['RANK']}")
    os.makedirs(results, mode=0o700, exist_ok=True)
    # Loading the call may need cloudpickle, which is next to this file.
    sys.path.append(folder)
    try:
        with open(os.path.join(folder, "call.pkl"), "rb") as file:
            function, args = pickle.load(file)
        value = function(*args)
        data = pickle.dumps(value, protocol=4) if call["trusted"] else json.dumps(plain(value)).encode()
    except Exception as error:
        failure = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        write(path + ".failure", json.dumps(failure).encode())
        raise
    write(path, data)


def plain(value: object) -> Any:
    """Return a value as JSON; a type that JSON lacks becomes an object whose key is the type's name."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) is list:
        return [plain(item) for item in value]
    if type(value) is dict:
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    if type(value) in (tuple, set, frozenset):
        form: dict[str, object] = {type(value).__name__: [plain(item) for item in value]}  # type: ignore[attr-defined]
        return form
    raise TypeError(
        f"the result holds a {type(value).__module__}.{type(value).__name__}; return numbers, text, bytes, lists, "
        "tuples, sets and dicts, or pass trust_results=True"
    )


def write(path: str, data: bytes) -> None:
    """Write a file so that a reader never sees a part of it."""
    with open(path + ".part", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


if __name__ == "__main__":
    main()
