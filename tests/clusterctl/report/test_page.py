"""The page of a run, and the comparison of runs: their content, size and safety, and what a browser makes of them."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from clusterctl.jobs.run_folder import RunDir
from clusterctl.report import compare
from clusterctl.report.page import Subject, page
from clusterctl.report.trackers import as_csv
from tests.clusterctl.conftest import Run
from tests.support.run_folders import BEGAN, CONFIG, restarted_run, start_line, step_line, write_lines

EVIL = (
    "<script>document.title='taken over'</script>",
    "<img src=x onerror=\"document.title='taken over'\">",
    "</pre></details></script><svg onload=\"document.title='taken over'\">",
    "\x1b[31mred\x1b[0m and \u202ebackwards",
    "训练完成：损失 2.1",
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def with_log(run: RunDir, *lines: str) -> RunDir:
    log = run.log("node1", 0, "out", 2)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(line + "\n" for line in lines))
    return run


def test_the_page_shows_the_run(tmp_path: Path) -> None:
    text = page(with_log(restarted_run(tmp_path), "the last line"))
    for part in (
        "tiny-1122-100000-abcd",
        "6 → 2.1",
        "loss, repeated later",
        "started again after step 20",
        "rank 3 on node2 (device 1) was killed by signal 9 (SIGKILL)",
        "0 to 25",
        "/nodes/node1/r/checkpoints/step-00000040",
        "train.model.layers",
        "op gelu",
        "the last line",
        "device-hours",
    ):
        assert part in text, part


class Tags(html.parser.HTMLParser):
    """Collects the tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_text_of_a_run_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    run = with_log(restarted_run(tmp_path), *EVIL)
    lines = run.events.read_text()
    run.events.write_text(lines + json.dumps({"time": BEGAN, "event": "note", "text": EVIL[0]}) + "\n")
    tags = Tags()
    tags.feed(page(run))
    names = [name for name, _ in tags.seen]
    assert names.count("script") == 1 and "img" not in names
    wanted = {"src", "href", "style", "onload", "onerror", "xlink:href"}
    assert not [found for _, found in tags.seen if wanted & found.keys()]
    policy = next(found["content"] for name, found in tags.seen if name == "meta" and "http-equiv" in found)
    assert (
        policy is not None
        and policy.startswith("default-src 'none'; style-src 'sha256-")
        and "unsafe" not in policy
    )
    assert "\x1b" not in page(run) and "\u202e" not in page(run) and EVIL[4] in page(run)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_it_without_a_network_and_runs_nothing_of_a_log(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(with_log(restarted_run(tmp_path), *EVIL)))
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--virtual-time-budget=2000",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "<title>tiny-1122-100000-abcd: report</title>" in done.stdout, done.stderr[-2000:]
    assert "taken over</title>" not in done.stdout and "训练完成" in done.stdout
    # The page's own script and style have run: their hashes fit the policy.
    assert "Content Security Policy" not in done.stderr and "Uncaught" not in done.stderr


def test_a_hundred_thousand_steps_make_a_small_page(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    lines = [
        step_line(step, 100_000, BEGAN + step, grad_norm=(step * 7919 % 1000) / 7)
        for step in range(1, 100_001)
    ]
    write_lines(run.metrics, [start_line(0, BEGAN, 1), *lines])
    text = page(with_log(run, *("x" * 1000 for _ in range(1000))))
    assert len(text.encode()) < 500_000


def test_a_run_without_metrics_or_state_has_a_page(tmp_path: Path) -> None:
    run = restarted_run(tmp_path)
    for path in (run.metrics, run.state, run.events):
        path.unlink()
    assert "tiny-1122-100000-abcd" in page(run)


def other_run(folder: Path, **config: object) -> RunDir:
    run = restarted_run(folder, "other-1122-110000-abcd")
    text = run.metrics.read_text()
    run.metrics.write_text(text.replace(json.dumps(CONFIG)[1:-1], json.dumps({**CONFIG, **config})[1:-1]))
    return run


def test_runs_are_compared_by_settings_speed_and_the_first_step_that_differs(tmp_path: Path) -> None:
    first, second = restarted_run(tmp_path), other_run(tmp_path, seed=7)
    same = compare.compare([Subject.of(first), Subject.of(second)])
    assert [(row.key, row.values) for row in same.config] == [("train.seed", ("1234", "7"))]
    assert same.first[0].describe() == "the same loss in all 40 common steps"
    changed = second.metrics.read_text().replace(
        '"step": 33, "steps": 40, "loss": ', '"step": 33, "steps": 40, "loss": 1'
    )
    second.metrics.write_text(changed)
    differs = compare.compare([Subject.of(first), Subject.of(second)])
    assert differs.first[0].step == 33 and differs.as_json()["first_difference"]
    assert compare.compare([Subject.of(first), Subject.of(second)], tolerance=10).first[0].step is None
    text = compare.page(differs)
    assert "train.seed" in text and "the loss first differs at step 33" in text


def test_report_and_compare_write_files_and_never_over_a_foreign_one(
    tmp_path: Path, command_line: Run
) -> None:
    run = restarted_run(tmp_path / "runs")
    other_run(tmp_path / "runs", seed=7)
    code, out, err = command_line("report", "tiny", "--against", "other", "-o", "r.html", "--csv", "r.csv")
    assert (code, out) == (0, "r.csv\nr.html\n"), err
    assert "Different from other-1122-110000-abcd" in (tmp_path / "r.html").read_text()
    assert command_line("report", "tiny", "-o", "r.html")[0] == 0, "our own file is replaced"
    (tmp_path / "notes.html").write_text("mine")
    code, _, err = command_line("report", "tiny", "-o", "notes.html")
    assert (
        code == 2
        and "was not written by clusterctl" in err
        and (tmp_path / "notes.html").read_text() == "mine"
    )
    assert command_line("report", "tiny", "-o", "missing/r.html")[0] == 2
    assert command_line("report", "tiny")[1] == f"{run.root / 'report.html'}\n"
    code, out, _ = command_line("compare", "tiny", "other", "--html", "c.html")
    assert code == 0 and "train.seed" in out and "the same loss in all 40 common steps" in out
    assert "Settings that differ" in (tmp_path / "c.html").read_text()
    assert command_line("compare", "tiny", "tiny")[0] == 2


def test_csv_holds_every_step_and_evaluation(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(restarted_run(tmp_path)))))
    steps = [row for row in rows if row["event"] == "step"]
    assert len(steps) == 45 and steps[0]["loss"] == "6" and steps[-1]["step"] == "40"
    assert [row["attempt"] for row in steps[24:26]] == ["1", "2"]
    assert [row["loss"] for row in rows if row["event"] == "eval"] == ["7.0", "2.5"]


def test_the_style_and_script_are_installed_with_the_package() -> None:
    root = Path(__file__).resolve().parents[3]
    assert re.search(r'"clusterctl.report" = \["\*.css", "\*.js"\]', (root / "pyproject.toml").read_text())


def test_a_run_without_steps_is_named_where_runs_are_compared(tmp_path: Path) -> None:
    first, second = restarted_run(tmp_path), other_run(tmp_path)
    second.metrics.unlink()
    found = compare.compare([Subject.of(first), Subject.of(second)]).first[0]
    assert found.describe() == f"losses can't be compared: no steps were found in {second.run_id}"
    both = compare.compare([Subject.of(second), Subject.of(second)]).first[0]
    assert both.silent == (second.run_id, second.run_id)
