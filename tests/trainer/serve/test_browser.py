from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.trainer.serve.conftest import Server

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def test_the_page_loads_nothing_from_elsewhere(server: Server) -> None:
    status, text = server.ask("GET", "/")
    assert status == 200 and not re.findall(r"(?:src|href)\s*=|https?://|@import|url\(", text)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_page_shows_a_text_in_a_browser(server: Server, tmp_path: Path) -> None:
    assert BROWSER is not None
    expected = server.complete(prompt="one two", max_tokens=64, temperature=0.8, top_k=40, seed=1)
    assert expected["usage"]["completion_tokens"]
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path}",
            # Time for the model; the page itself is ready at once.
            "--virtual-time-budget=20000",
            "--dump-dom",
            f"http://127.0.0.1:{server.port}/?prompt=one+two",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    state = re.search(r'id="state"[^>]*>([^<]*)<', done.stdout)
    written = re.search(r'<pre id="text"[^>]*>(.*?)</pre>', done.stdout, re.DOTALL)
    assert state and re.fullmatch(r"\d+ tokens", state[1]), done.stdout[-2000:] + done.stderr[-2000:]
    assert written and (html.unescape(written[1]) or state[1] == "0 tokens")
