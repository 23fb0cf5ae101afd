"""Inject faults into runs on real SSH nodes and check that every run ends well. Needs root.

    python -m bench.faults --seed 1 --count 200          the campaign: under half an hour on two cores
    python -m bench.faults --interrupts 100              Ctrl-C at random moments of `launch`
    python -m bench.faults --kinds 'node|link' --count 8 only some kinds
    python -m bench.faults --seed 1 --only 17            repeat one fault of a campaign
    python -m bench.faults --seed 2 --runs 1-20 --results FILE   part of a campaign; skips faults with a verdict in FILE
    python -m bench.faults --list --count 40             list the faults and do not inject them

Most faults hit a stand-in (bench/faults/fake_trainer.py) that follows the trainer's contract without torch; some hit
the embedded trainer. Lanes work in parallel, each on a cluster of its own; the folder of a fault with an unexpected
outcome is kept. bench/faults/draw.py lists the expected end of each kind, bench/faults/judge.py the rules for any run.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.faults.draw import (
    Fault,
    draw,
    draw_interrupts,
    names,
)
from bench.faults.field import Lane, Scanner, end_nodes
from bench.faults.judge import (
    Story,
    figures,
    judge,
    table,
)
from bench.faults.play import NotPlayed, Play
from bench.faults.seen import as_json
from bench.field import take_signals
from clusterctl.errors import ClusterctlError
from clusterctl.sandbox import demo, namespaces
from native.compiled import build, library


class Campaign:
    """Faults that are given to lanes as these become free."""

    def __init__(
        self,
        faults: Sequence[Fault],
        folder: Path,
        lanes: int,
        *,
        keep: bool = False,
        results: Path | None = None,
    ) -> None:
        self.folder, self.count, self.keep, self.results = folder, len(faults), keep, results
        self.waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
        for fault in faults:
            self.waiting.put(fault)
        self.stories: list[Story] = []
        self.problems: list[str] = []
        self.telling, self.closed = threading.Lock(), threading.Event()
        self.data = make_data(folder) if any(fault.real for fault in faults) else None
        self.scanner = Scanner()
        self.lanes = min(lanes, len(faults))
        self.ended = [threading.Event() for _ in range(self.lanes)]
        self.began = time.monotonic()

    def play(self) -> list[Story]:
        """Play all faults; an interrupt ends the campaign after cleaning up."""
        threads = [threading.Thread(target=self._lane, args=(number,)) for number in range(self.lanes)]
        try:
            for thread in threads:
                thread.start()
            self._wait(threads)
        except KeyboardInterrupt:
            log("ending: running faults are cleaned up first")
        finally:
            with interrupts_wait():
                self.closed.set()
                self._wait(threads)
                self._end_nodes()
                self.scanner.close()
        return self.stories

    def _wait(self, threads: Sequence[threading.Thread]) -> None:
        """Wait until the lanes that were started have ended.

        Before Python 3.13, a `join` that Ctrl-C interrupts marks a running thread as ended.
        """
        for thread, ended in zip(threads, self.ended, strict=True):
            while thread.ident is not None and not ended.wait(0.2):
                pass

    def _end_nodes(self) -> None:
        """End nodes that are left of any lane."""
        for number in range(self.lanes):
            # A terminal sends Ctrl-C also to the programs with which a lane ends its nodes.
            try:
                end_nodes(self.folder / f"l{number}")
            except ClusterctlError as error:
                self.problems.append(f"lane {number} is still up: {error}")

    def _lane(self, number: int) -> None:
        try:
            self._play_in(self.folder / f"l{number}")
        finally:
            self.ended[number].set()

    def _play_in(self, folder: Path) -> None:
        folder.mkdir()
        lane = Lane(folder)
        try:
            while not self.closed.is_set():
                fault = self.waiting.get_nowait()
                self._one(lane, fault, folder / f"f{fault.number}")
                if not all(lane.is_up(node.name) for node in lane.box.nodes):
                    lane.renew()
        except queue.Empty:
            return
        finally:
            lane.close()

    def _one(self, lane: Lane, fault: Fault, folder: Path) -> None:
        try:
            story = Play(lane, self.scanner, fault, folder, self.data).play()
        except Exception as error:
            # Report a fault that could not be injected, and continue with the others.
            reason = str(error) if isinstance(error, NotPlayed) else traceback.format_exc()
            with self.telling:
                self.problems.append(f"fault {fault.number}, {fault}: could not be injected")
                if self.results is not None:
                    note_missed(self.results, fault, reason)
                log(f"{fault.number:>4}  {fault}: could not be injected: {reason}\nsee {folder}")
            lane.renew()
            return
        if fault.kind == "disk full" and lane.is_up(fault.node):
            lane.big_disk(fault.node)
        verdict = judge(story)
        (folder / "story.json").write_text(as_json(story) + "\n")
        with self.telling:
            self.stories.append(story)
            if self.results is not None:
                note_result(self.results, story)
            log(line_of(story, len(self.stories), self.count))
            if not verdict.well or verdict.cause is False or story.left:
                log("\n".join(f"          {problem}" for problem in self._wrong(story, folder)))
        if verdict.well and verdict.cause is not False and not story.left and not self.keep:
            shutil.rmtree(folder)
            shutil.rmtree(lane.shared / f"f{fault.number}", ignore_errors=True)

    def _wrong(self, story: Story, folder: Path) -> list[str]:
        verdict = judge(story)
        cause = [f"cause: {', '.join(story.reasons) or 'see its output'}"] if verdict.cause is False else []
        return [*verdict.broken, *cause, *(f"left: {path}" for path in story.left), f"see {folder}"]


def line_of(story: Story, number: int, count: int) -> str:
    """Describe the result of one fault in one line."""
    verdict = judge(story)
    cause = {True: "cause right", False: "CAUSE WRONG", None: ""}[verdict.cause]
    parts = [
        "well" if verdict.well else "BAD END",
        cause,
        "" if not story.left else f"LEFT {len(story.left)}",
    ]
    known = f"known in {story.known:.2f} s" if story.known is not None else ""
    parts += [known, f"{story.phase or 'refused'} in {story.seconds:.1f} s"]
    return f"{number:>4}/{count}  {story.fault.number:>4}  {story.fault}: {', '.join(filter(None, parts))}"


def make_data(folder: Path) -> Path:
    """Write a corpus of a few hundred kilobytes for the embedded trainer."""
    corpus, target = folder / "corpus.jsonl", folder / "data"
    demo.write_corpus(corpus)
    demo.train_tokenizer(corpus, target / "tokenizer.json", 512)
    demo.build_data(corpus, target / "tokenizer.json", target / "text_document")
    return target


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Answer Ctrl-C and other requests to end with a line: the block is not interrupted."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    answer = "still cleaning up: this takes up to a minute"
    before = {number: signal.signal(number, lambda *_: log(answer)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def build_library() -> None:
    """Compile the trainer's library if it is missing or old: a rank that compiles takes longer than any timeout."""
    reason = library.why_not()
    if reason:
        log(f"compiling the library of the embedded trainer: {reason}")
        build.build()


def log(text: str) -> None:
    print(text, flush=True)


def positive(text: str) -> int:
    """Return the number in `text`, which must be at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least one")
    return int(text)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="\n".join((__doc__ or "").splitlines()[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=positive, default=200, help="number of faults")
    parser.add_argument("--interrupts", type=positive, metavar="N", help="only Ctrl-C, at N random moments")
    parser.add_argument("--kinds", metavar="PATTERN", help="only kinds with this in their name")
    parser.add_argument(
        "--only", type=int, action="append", metavar="NUMBER", help="only this fault of the campaign"
    )
    parser.add_argument("--runs", type=span, metavar="A-B", help="only these faults of the campaign")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="append each verdict to this file; skip faults that have one",
    )
    parser.add_argument(
        "--share", type=float, default=0.1, help="approximate share of faults against the embedded trainer"
    )
    parser.add_argument("--lanes", type=positive, default=4, help="runs side by side")
    parser.add_argument("--list", action="store_true", help="list the faults and do not inject them")
    parser.add_argument("--keep", action="store_true", help="also keep the folders of faults with a good end")
    parser.add_argument("--folder", type=Path, help="the folder to work in; it is never deleted")
    return parser.parse_args(argv)


def chosen(options: argparse.Namespace) -> list[Fault]:
    """Return the faults that the command line selects."""
    if options.interrupts:
        found = draw_interrupts(options.seed, options.interrupts)
    else:
        kinds = names(options.kinds) if options.kinds else ()
        found = draw(options.seed, options.count, kinds, options.share)
    wanted = options.only or options.runs or range(1, len(found) + 1)
    # What could not be injected is tried again.
    done = {entry["number"] for entry in results_of(options.results) if "missed" not in entry}
    return [fault for fault in found if fault.number in wanted and fault.number not in done]


def span(text: str) -> range:
    """Return the range of numbers of `A-B`."""
    first, _, last = text.partition("-")
    return range(positive(first), positive(last or first) + 1)


def results_of(path: Path | None) -> list[dict[str, Any]]:
    """Return the verdicts of earlier parts of a campaign."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def note_result(path: Path, story: Story) -> None:
    """Append the verdict of one fault to a file."""
    verdict = judge(story)
    entry = {
        "number": story.fault.number,
        "fault": str(story.fault),
        "well": verdict.well,
        "cause": verdict.cause,
    }
    entry |= {"left": len(story.left), "broken": list(verdict.broken)}
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def note_missed(path: Path, fault: Fault, reason: str) -> None:
    """Append to a file that a fault could not be injected."""
    entry = {
        "number": fault.number,
        "fault": str(fault),
        "missed": reason.splitlines()[-1 if "Traceback" in reason else 0],
    }
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def totals(path: Path) -> str:
    """Return the totals over all parts of a campaign."""
    every = results_of(path)
    entries = [entry for entry in every if "missed" not in entry]
    missed = {entry["number"] for entry in every} - {entry["number"] for entry in entries}
    never = f", {len(missed)} could not be injected: {sorted(missed)}" if missed else ""
    causes = [entry["cause"] for entry in entries if entry["cause"] is not None]
    return (
        f"all parts: {len(entries)} faults, {sum(entry['well'] for entry in entries)} ended well, cause right in "
        f"{sum(causes)} of {len(causes)}, {sum(bool(entry['left']) for entry in entries)} left something behind{never}"
    )


def main() -> int:
    options = arguments()
    faults = chosen(options)
    if options.list or not faults:
        log("\n".join(f"{fault.number:>4}  {fault}" for fault in faults) or "no fault to inject")
        return 0
    missing = namespaces.why_not()
    if missing:
        log(f"nodes in namespaces are not possible here: {missing}")
        return 2
    if any(fault.real for fault in faults):
        try:
            build_library()
        except build.BuildFailed as reason:
            log(f"the embedded trainer has no library, so its faults cannot be judged: {reason}")
            return 2
    take_signals()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults-", dir="/var/tmp"))
    folder.mkdir(exist_ok=True)
    campaign = Campaign(faults, folder, options.lanes, keep=options.keep, results=options.results)
    stories = campaign.play()
    log("\n" + "\n".join(table(stories)) + "\n\n" + "\n".join([*figures(stories), *campaign.problems]))
    log(f"{len(stories)} faults in {(time.monotonic() - campaign.began) / 60:.1f} min, seed {options.seed}")
    if options.results is not None:
        log(totals(options.results))
    verdicts = [judge(story) for story in stories]
    fine = all(verdict.well and verdict.cause is not False for verdict in verdicts) and not any(
        story.left for story in stories
    )
    if fine and not campaign.problems and options.folder is None:
        shutil.rmtree(folder)
    else:
        log(f"the folders of faults with an unexpected outcome are in {folder}")
    return int(not fine or bool(campaign.problems))


if __name__ == "__main__":
    sys.exit(main())
