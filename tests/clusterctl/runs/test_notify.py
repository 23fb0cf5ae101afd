"""Commands and webhooks that are called about a run."""

from __future__ import annotations

import base64
import http.server
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import InputFaults
from clusterctl.jobs import job as jobs
from clusterctl.jobs.parts.notify import program_problem, resolved
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.causes.cause import Cause
from clusterctl.runs.causes.patterns import kind_of
from clusterctl.runs.notify import Notifier
from clusterctl.runs.state import RankState
from tests.support.run_folders import restarted_run


def notifier(run: RunDir, target: str) -> Notifier:
    record = run.read_record()
    return Notifier(run, replace(record, job=replace(record.job, notify=target)))


def notes(run: RunDir) -> list[str]:
    return [event.facts["text"] for event in run.event_lines() if event.kind == "note"]


def test_a_command_gets_the_message_on_its_input_and_in_its_environment(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    tell = notifier(run, f'cat > {tmp_path}/message; echo "$CLUSTERCTL_EVENT" > {tmp_path}/event')
    tell("restart", "restart 1 of 3: rank 3 was killed")
    tell.close()
    message = json.loads((tmp_path / "message").read_text())
    assert (message["run"], message["event"], message["step"]) == (run.run_id, "restart", 40)
    assert message["text"] == "restart 1 of 3: rank 3 was killed"
    assert (tmp_path / "event").read_text() == "restart\n" and notes(run) == []


def test_a_hang_is_reported_once_per_attempt(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    tell = notifier(run, f'echo "$CLUSTERCTL_TEXT" >> {tmp_path}/texts')
    tell.stalled("no rank writes")
    tell.stalled("rank 0 hung")
    tell.close()
    tell("restart", "restart 1 of 1")
    tell.close()
    tell.stalled("again")
    tell.close()
    assert (tmp_path / "texts").read_text().splitlines() == ["no rank writes", "restart 1 of 1", "again"]


def test_a_webhook_gets_the_message_as_json(tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []
    logins: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            logins.append(self.headers["Authorization"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            """Be silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tell = notifier(restarted_run(tmp_path), f"http://127.0.0.1:{server.server_port}/hook?token=secret")
        tell("finished", "finished at step 40")
        tell.not_finite(7)
        tell.not_finite(8)
        tell.close()
        # A user and a password in the address, as some services give it.
        tell = notifier(restarted_run(tmp_path / "2"), f"http://me:a%40b@127.0.0.1:{server.server_port}/x")
        tell("failed", "lost node2")
        tell.close()
        server.shutdown()
    assert sorted(message["event"] for message in received) == ["failed", "finished", "nan"]
    assert logins == [None, None, "Basic " + base64.b64encode(b"me:a@b").decode()]
    assert "step 7" in next(message["text"] for message in received if message["event"] == "nan")


def test_a_failure_is_noted_without_the_address_and_disturbs_nothing(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    for target in ("exit 3", "http://127.0.0.1:9/hook?token=secret"):
        tell = notifier(run, target)
        tell("failed", "x")
        tell.close()
    found = notes(run)
    assert "notify: the command ended with exit code 3" in found and len(found) == 2
    assert not any("secret" in text for text in found)
    silent = notifier(run, "")
    silent("failed", "x")
    silent.close()


def test_a_job_names_its_command(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("command: [python, train.py]\nnotify: ./tell.sh\n")
    assert jobs.load(path).notify == "./tell.sh"
    path.write_text("command: [python, train.py]\nnotify: [x]\n")
    with pytest.raises(InputFaults, match=r"job\.yaml:2"):
        jobs.load(path)


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("nosuch-program --now", "no program 'nosuch-program' is on PATH"),
        ("A=1 B='2 3' nosuch-program", "no program 'nosuch-program' is on PATH"),
        ("./nosuch.sh", "./nosuch.sh: no such file in {here}"),
        ("/nosuch/tell.sh x | cat", "/nosuch/tell.sh: no such file"),
        ("'./no such.sh'", "./no such.sh: no such file in {here}"),
        ("~/nosuch.sh", "{here}/nosuch.sh: no such file"),
        ("$HOME/nosuch.sh", "{here}/nosuch.sh: no such file"),
        ("${HOME}/nosuch.sh;true", "{here}/nosuch.sh: no such file"),
        ("$TELL", "$TELL holds neither an address nor a command that can start here"),
        ("./plain.sh", "./plain.sh is not executable"),
        ("/tmp", "/tmp is a folder, not a program"),
        # Programs that exist, and what only a shell can know.
        ("cat > message", ""),
        ("curl -d @- https://example.com", "" if shutil.which("curl") else "no program 'curl' is on PATH"),
        ("A=1", ""),
        ("cd /tmp && ./x", ""),
        ("exit 3", ""),
        ("if true; then nosuch; fi", ""),
        ("! nosuch", ""),
        ("(nosuch)", ""),
        ("{ nosuch; }", ""),
        ("f() { true; }; f", ""),
        ("$UNSET/x.sh", ""),
        ("`which sh` x", ""),
        ("it's unfinished", ""),
        ("", ""),
        ("https://example.com/nosuch", ""),
        ("$HOOK", ""),
    ],
)
def test_a_command_whose_program_does_not_exist_is_found(
    here: Path, monkeypatch: pytest.MonkeyPatch, target: str, problem: str
) -> None:
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("TELL", "hooks.example.com/secret")
    monkeypatch.setenv("HOOK", "https://example.com/nosuch")
    (here / "plain.sh").write_text("")
    found = program_problem(target)
    assert (found[0] if found else "") == problem.format(here=here)


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("https://hooks.example.com/services/T0/B0/token", "https://hooks.example.com/***"),
        ("https://user:word@example.com", "https://example.com/***"),
        ("http://127.0.0.1:8080/?token=x", "http://127.0.0.1:8080/***"),
        ("https://example.com:99999999/x", "https://***"),
        ("https://example.com/", "https://example.com/"),
        ("./notify.sh", "./notify.sh"),
        ("$HOOK", "$HOOK"),
    ],
)
def test_a_record_holds_no_address_that_may_be_a_password(tmp_path: Path, target: str, shown: str) -> None:
    run = restarted_run(tmp_path)
    record = run.read_record()
    run.write_record(replace(record, job=replace(record.job, notify=target)))
    assert run.read_record().job.notify == shown
    # The process that wrote the record knows the address; another one does not.
    assert resolved(shown)[0] == ("" if target == "$HOOK" else target)


def test_an_address_in_a_variable_is_read_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = restarted_run(tmp_path)
    monkeypatch.setenv("HOOK", f"cat > {tmp_path}/message")
    tell = notifier(run, "${HOOK}")
    tell("finished", "done")
    tell.close()
    assert json.loads((tmp_path / "message").read_text())["text"] == "done"
    monkeypatch.delenv("HOOK")
    unknown = notifier(run, "https://elsewhere.example/***")
    for each in (notifier(run, "$HOOK"), unknown):
        each("finished", "done")
        each.close()
    first, second = notes(run)
    assert first == "notify: $HOOK is not set here"
    assert "is not recorded: notify: $NAME reads the address from the variable NAME" in second


def test_no_word_that_the_program_wrote_is_sent(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    rank = RankState(1, node="node1", device=1, exit_code=1)
    tail = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "ValueError: token hf_abc is not valid",
    ]
    kind = kind_of(rank, tail)
    assert kind.words.endswith("ValueError: token hf_abc is not valid")
    cause = Cause(f"rank 1 on node1 (device 1) {kind.words}", quoted=kind.quoted)
    run.write_json(run.cause, {"format": 1, "run": run.run_id, **cause.as_json()})
    tell = notifier(run, f"cat >> {tmp_path}/message; env >> {tmp_path}/message")
    tell("restart", f"restart 1 of 3 now: {cause.title}")
    tell("failed", cause.title)
    tell.close()
    text = (tmp_path / "message").read_text()
    assert text.count("exited with code 1: ValueError\n") == 2 and "hf_abc" not in text
