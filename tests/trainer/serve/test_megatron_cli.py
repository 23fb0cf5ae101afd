"""Megatron's own text_generation_cli.py, used at a terminal, gets texts and errors from the server.

`MEGATRON_LM=FOLDER` names a checkout of Megatron-LM.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.trainer.serve.conftest import Server

PROGRAM = Path(os.environ.get("MEGATRON_LM", "MEGATRON_LM")) / "tools" / "text_generation_cli.py"
PROMPT, COUNT = "Enter prompt: ", "Enter number of tokens to generate: "
SECONDS = 60
pytestmark = [
    pytest.mark.skipif(not PROGRAM.is_file(), reason="set MEGATRON_LM to a checkout of Megatron-LM"),
    pytest.mark.skipif(not find_spec("requests"), reason="requests is not installed"),
]


class Terminal:
    """The program in a terminal of its own."""

    def __init__(self, port: int) -> None:
        self._side, other = pty.openpty()
        words = [sys.executable, str(PROGRAM), f"127.0.0.1:{port}"]
        self.process = subprocess.Popen(words, stdin=other, stdout=other, stderr=other)
        os.close(other)
        self.until(PROMPT)

    def until(self, wanted: str) -> str:
        """Return what the program writes before `wanted`."""
        text, end = "", time.monotonic() + SECONDS
        while not text.endswith(wanted):
            assert time.monotonic() < end, text
            try:
                text += os.read(self._side, 4096).decode()
            except OSError:
                raise AssertionError(f"the program ended: {text}") from None
        return text.removesuffix(wanted)

    def type(self, line: str) -> None:
        os.write(self._side, f"{line}\n".encode())

    def answer(self, prompt: str, count: str) -> str:
        """Return what the program shows for a prompt and a number of tokens, until it waits for the next prompt."""
        self.type(prompt)
        self.until(COUNT)
        self.type(count)
        echo, shown = self.until(PROMPT).replace("\r\n", "\n").split("\n", 1)
        assert echo == count
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._side)


@pytest.fixture
def terminal(server: Server) -> Iterator[Terminal]:
    found = Terminal(server.port)
    yield found
    found.close()


def test_a_prompt_is_continued(terminal: Terminal) -> None:
    shown = terminal.answer("one two", "5")
    assert shown.startswith("Megatron Response: \none two")
    assert len(shown.rstrip()) > len("Megatron Response: \none two")


def test_wrong_input_is_answered_and_the_program_continues(terminal: Terminal, server: Server) -> None:
    assert terminal.answer("", "5") == "Error 400: prompts: an empty prompt needs add_BOS true\n"
    assert terminal.answer("one", "-3").startswith("Error 400: tokens_to_generate: -3: at least 1")
    assert terminal.answer("one", "'many'").startswith('Error 400: tokens_to_generate: "many" is not a whole')
    long = " ".join(["one"] * 500)
    assert terminal.answer(long, "5").startswith("Error 400: prompts[0]: the prompt has 500 tokens")
    assert terminal.answer("one two", "2").startswith("Megatron Response: \none two")
    assert server.process.poll() is None
