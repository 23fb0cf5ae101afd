"""Notify people about a run: call a command or a webhook at its end, at a failure, a restart, a stall or a NaN.

The message contains the run's name, what happened and why; never an environment variable, an argument or a log line,
and of an exception only the type.
"""

from __future__ import annotations

import base64
import json
import subprocess
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from clusterctl.environment import environment
from clusterctl.jobs.parts.notify import is_web, resolved
from clusterctl.runs.causes.cause import read_cause

if TYPE_CHECKING:
    from clusterctl.jobs.record import RunRecord
    from clusterctl.jobs.run_folder import RunDir

# Seconds that a command or a webhook may take.
LIMIT = 20.0
KINDS = ("finished", "failed", "stopped", "restart", "stall", "nan")


@dataclass(frozen=True)
class Message:
    """The message about one event."""

    run: str
    event: str
    """One of KINDS."""
    text: str
    time: float
    step: int | None = None
    folder: str = ""


class Notifier:
    """Calls the command or webhook of a job, each time in a separate thread; a failure becomes an event of the run."""

    def __init__(self, run: RunDir, record: RunRecord) -> None:
        self.run, self.target = run, record.job.notify
        self._threads: list[threading.Thread] = []
        self._seen_nan = self._stalled = False

    def __call__(self, event: str, text: str) -> None:
        """Send a message about an event, unless the job has no `notify`."""
        if event == "restart":
            self._stalled = False
        if not self.target:
            return
        cause = read_cause(self.run)
        if cause and cause.quoted.strip(": "):
            text = text.replace(cause.quoted, "")
        last = self.run.last_step()
        step = last.step if last else None
        message = Message(self.run.run_id, event, text, time.time(), step, str(self.run.root))
        thread = threading.Thread(target=self._send, args=(message,), name="notify")
        thread.start()
        self._threads.append(thread)

    def not_finite(self, step: int | None) -> None:
        """Report the first step whose loss is not finite."""
        if not self._seen_nan:
            self._seen_nan = True
            self("nan", f"the loss of step {step} is not finite")

    def stalled(self, text: str) -> None:
        """Report the first sign of a hang in an attempt: the ranks that are ended for it follow."""
        if not self._stalled:
            self._stalled = True
            self("stall", text)

    def close(self) -> None:
        """Wait until all messages were sent or have timed out."""
        for thread in self._threads:
            thread.join(LIMIT + 1)

    def _send(self, message: Message) -> None:
        text = json.dumps(asdict(message))
        target, problem = resolved(self.target)
        if target:
            problem = _post(target, text) if is_web(target) else _run(target, message, text)
        if problem:
            self.run.add_event("note", text=f"notify: {problem}")


def _post(url: str, text: str) -> str:
    """Send the message to a webhook; return what went wrong, or ""."""
    # It loads ssl and email: 15 ms, which a run without a webhook does not spend.
    import urllib.error
    import urllib.request

    headers = {"Content-Type": "application/json"}
    try:
        parts = urlsplit(url)
        if parts.username is not None:
            # urllib treats a user and password as a part of the host name.
            url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        request = urllib.request.Request(url, text.encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=LIMIT):
            return ""
    except (urllib.error.URLError, OSError, ValueError) as error:
        # The address may hold a secret.
        return f"the webhook could not be called: {getattr(error, 'reason', type(error).__name__)}"


def _run(command: str, message: Message, text: str) -> str:
    """Run a command of the user's shell with the message on its standard input; return what went wrong, or ""."""
    facts = {
        "CLUSTERCTL_RUN": message.run,
        "CLUSTERCTL_EVENT": message.event,
        "CLUSTERCTL_TEXT": message.text,
    }
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            input=text,
            text=True,
            capture_output=True,
            timeout=LIMIT,
            env={**environment(), **facts},
        )
    except subprocess.TimeoutExpired:
        return f"the command did not end within {LIMIT:g} s"
    except OSError as error:
        return f"the command could not start: {error.strerror}"
    return f"the command ended with exit code {done.returncode}" if done.returncode else ""
