"""Read where a job's data are: in a folder on the nodes, or in an object store."""

from __future__ import annotations

from pathlib import Path

from clusterctl.document import Section
from clusterctl.storage.address import StoreOptions, address_fault, endpoint_fault, is_address


def take_data_there(top: Section) -> str:
    """Return the folder that all nodes have already; "" if the job names none."""
    folder = top.take_text("data_there")
    if folder and not folder.startswith(("/", "~/")):
        top.fault("data_there", f"{folder!r} is not an absolute path", "as in /data/wiki or ~/wiki")
    if folder and top.value.get("data") is not None:
        top.fault(
            "data_there",
            "`data` is given too",
            "data: a local folder, pushed; data_there: a folder on every node",
        )
    return folder


def take_data_store(top: Section) -> str:
    """Return `data` where it is an address in an object store."""
    if not is_address(top.value.get("data")):
        return ""
    text = top.take_text("data")
    fault = address_fault(text)
    if fault[0]:
        top.fault("data", *fault)
    return text


def take_storage(top: Section, path: Path) -> StoreOptions:
    """Return the `storage` part: how object stores are reached."""
    inner = top.section("storage")
    credentials = inner.take_text("credentials")
    if credentials and not credentials.startswith(("/", "~/")):
        credentials = str(path.parent.absolute() / credentials)
    found = StoreOptions(inner.take_text("endpoint"), inner.take_text("region"), credentials)
    if found.endpoint and (fault := endpoint_fault(found.endpoint))[0]:
        inner.fault("endpoint", *fault)
    inner.done()
    return found
