from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.serve.conftest import Server
from trainer.serve.page import page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)


def test_the_page_loads_nothing_from_elsewhere(server: Server) -> None:
    status, text = server.ask("GET", "/")
    assert status == 200 and not re.findall(r"(?:src|href)\s*=|https?://|@import|url\(", text)


def test_only_a_server_with_a_key_asks_for_one() -> None:
    for with_key in (True, False):
        text = page("small", 128, "nonce", glm=False, with_key=with_key)
        assert ("<label hidden>API key" in text) is not with_key and "<label>Seed" in text
        assert "A window of 128 tokens" in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_page_shows_a_text_in_a_browser(server: Server, tmp_path: Path) -> None:
    assert BROWSER is not None
    url = f"http://127.0.0.1:{server.port}/?prompt=one+two"
    browser = subprocess.Popen(
        [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path}", url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        state, text = asyncio.run(shown(tmp_path / "DevToolsActivePort", url))
    finally:
        browser.kill()
        browser.wait()
    assert re.fullmatch(r"\d+ tokens? in \d+\.\d s(, the model ended the text)?", state), state
    assert text or state.startswith("0 tokens")


async def shown(port_file: Path, url: str, patience: float = 60.0) -> tuple[str, str]:
    """Return the page's state and text, when the state is no longer that of a text being written."""
    import aiohttp

    until = time.monotonic() + patience
    while not (port_file.is_file() and port_file.read_text().strip()):
        assert time.monotonic() < until, "the browser has not started"
        await asyncio.sleep(0.1)
    port = port_file.read_text().split()[0]
    async with aiohttp.ClientSession() as session:
        pages: list[dict[str, Any]] = []
        while not pages:
            assert time.monotonic() < until, "the browser has not opened the page"
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [page for page in await answer.json() if page["url"] == url]
            await asyncio.sleep(0.1)
        async with session.ws_connect(pages[0]["webSocketDebuggerUrl"]) as socket:
            while True:
                state, text = [
                    await value_of(socket, f'(document.getElementById("{name}") || {{}}).textContent || ""')
                    for name in ("state", "text")
                ]
                if state not in ("", "...") or time.monotonic() > until:
                    return state, text
                await asyncio.sleep(0.1)


async def value_of(socket: Any, expression: str) -> str:
    """Return the value of a JavaScript expression in the page."""
    await socket.send_json({"id": 1, "method": "Runtime.evaluate", "params": {"expression": expression}})
    answer = await socket.receive_json(timeout=30)
    return str(answer["result"]["result"].get("value", ""))
