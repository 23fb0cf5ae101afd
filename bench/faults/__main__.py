"""A seeded nemesis: runs on real SSH nodes, a fault in each, and whether all came through. Needs root.

    python -m bench.faults --seed 1 --count 200          the campaign: under half an hour on two cores
    python -m bench.faults --interrupts 100              Ctrl-C at random moments of `launch`
    python -m bench.faults --kinds 'node|link' --count 8 some kinds
    python -m bench.faults --seed 1 --only 17            one fault of a campaign again
    python -m bench.faults --seed 2 --runs 1-20 --results FILE   a piece of a campaign; what FILE holds is not repeated
    python -m bench.faults --list --count 40             what would be played

Most faults meet a stand-in (bench/faults/fake_trainer.py) that keeps the trainer's contract without torch; some meet
the embedded trainer. Lanes play in parallel, each with a cluster of its own; a fault with an unexpected outcome leaves
its folder. bench/faults/draw.py lists what each kind must lead to, bench/faults/judge.py what holds for any run.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.faults.draw import (
    Fault,
    draw,
    draw_interrupts,
    names,
)
from bench.faults.field import Lane, Scanner
from bench.faults.judge import (
    Story,
    figures,
    judge,
    table,
)
from bench.faults.play import NotPlayed, Play
from bench.faults.seen import as_json
from bench.field import take_signals
from clusterctl.sandbox import demo, namespaces
from native.compiled import build, library


class Campaign:
    """Faults, handed to lanes as these become free."""

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
        self.began = time.monotonic()

    def play(self) -> list[Story]:
        """Play all faults; an interrupt ends the campaign after cleaning up."""
        threads = [threading.Thread(target=self._lane, args=(number,)) for number in range(self.lanes)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except KeyboardInterrupt:
            self.closed.set()
            say("ending: what is under way is put away first")
            for thread in threads:
                thread.join()
        self.scanner.close()
        return self.stories

    def _lane(self, number: int) -> None:
        folder = self.folder / f"l{number}"
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
            # A fault that could not be played is reported, and the others continue.
            reason = str(error) if isinstance(error, NotPlayed) else traceback.format_exc()
            with self.telling:
                self.problems.append(f"fault {fault.number}, {fault}: could not be played")
                say(f"{fault.number:>4}  {fault}: could not be played: {reason}\nsee {folder}")
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
            say(line_of(story, len(self.stories), self.count))
            if not verdict.well or verdict.cause is False or story.left:
                say("\n".join(f"          {problem}" for problem in self._wrong(story, folder)))
        if verdict.well and verdict.cause is not False and not story.left and not self.keep:
            shutil.rmtree(folder)
            shutil.rmtree(lane.shared / f"f{fault.number}", ignore_errors=True)

    def _wrong(self, story: Story, folder: Path) -> list[str]:
        verdict = judge(story)
        cause = [f"cause: {', '.join(story.reasons) or 'see what it said'}"] if verdict.cause is False else []
        return [*verdict.broken, *cause, *(f"left: {path}" for path in story.left), f"see {folder}"]


def line_of(story: Story, number: int, count: int) -> str:
    """Return one fault as one line."""
    verdict = judge(story)
    cause = {True: "cause right", False: "CAUSE WRONG", None: ""}[verdict.cause]
    parts = [
        "well" if verdict.well else "NOT WELL",
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


def build_library() -> None:
    """Compile the trainer's library if none fits: a rank that compiles it takes longer than any wait for a step."""
    reason = library.why_not()
    if reason:
        say(f"compiling the library of the embedded trainer: {reason}")
        build.build()


def say(text: str) -> None:
    print(text, flush=True)


def positive(text: str) -> int:
    """Return a number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least one")
    return int(text)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="\n".join((__doc__ or "").splitlines()[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=positive, default=200, help="how many faults")
    parser.add_argument(
        "--interrupts", type=positive, metavar="N", help="Ctrl-C at N random moments, and nothing else"
    )
    parser.add_argument("--kinds", metavar="PATTERN", help="only kinds with this in their name")
    parser.add_argument(
        "--only", type=int, action="append", metavar="NUMBER", help="only this fault of the campaign"
    )
    parser.add_argument("--runs", type=span, metavar="A-B", help="only these faults of the campaign")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="append each verdict there, and skip what it holds"
    )
    parser.add_argument(
        "--share", type=float, default=0.1, help="roughly how many against the embedded trainer"
    )
    parser.add_argument("--lanes", type=positive, default=4, help="runs side by side")
    parser.add_argument("--list", action="store_true", help="say what would be played")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folders of those that came out well too"
    )
    parser.add_argument("--folder", type=Path, help="where; kept then, whatever comes of it")
    return parser.parse_args(argv)


def chosen(options: argparse.Namespace) -> list[Fault]:
    """Return the faults that a command line asks for."""
    if options.interrupts:
        found = draw_interrupts(options.seed, options.interrupts)
    else:
        kinds = names(options.kinds) if options.kinds else ()
        found = draw(options.seed, options.count, kinds, options.share)
    wanted = options.only or options.runs or range(1, len(found) + 1)
    done = {entry["number"] for entry in results_of(options.results)}
    return [fault for fault in found if fault.number in wanted and fault.number not in done]


def span(text: str) -> range:
    """Return the numbers of `A-B`."""
    first, _, last = text.partition("-")
    return range(positive(first), positive(last or first) + 1)


def results_of(path: Path | None) -> list[dict[str, Any]]:
    """Return the verdicts of earlier pieces of a campaign."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def note_result(path: Path, story: Story) -> None:
    """Append the verdict of one fault."""
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


def totals(path: Path) -> str:
    """Return the sums over all pieces of a campaign."""
    entries = results_of(path)
    causes = [entry["cause"] for entry in entries if entry["cause"] is not None]
    return (
        f"all pieces: {len(entries)} faults, {sum(entry['well'] for entry in entries)} ended well, cause right in "
        f"{sum(causes)} of {len(causes)}, {sum(bool(entry['left']) for entry in entries)} left something behind"
    )


def main() -> int:
    options = arguments()
    faults = chosen(options)
    if options.list or not faults:
        say("\n".join(f"{fault.number:>4}  {fault}" for fault in faults) or "nothing to play")
        return 0
    missing = namespaces.why_not()
    if missing:
        say(f"no nodes of namespaces here: {missing}")
        return 2
    if any(fault.real for fault in faults):
        try:
            build_library()
        except build.BuildFailed as reason:
            say(f"the embedded trainer has no library, so that no fault of it can be judged: {reason}")
            return 2
    take_signals()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults-", dir="/var/tmp"))
    folder.mkdir(exist_ok=True)
    campaign = Campaign(faults, folder, options.lanes, keep=options.keep, results=options.results)
    stories = campaign.play()
    say("\n" + "\n".join(table(stories)) + "\n\n" + "\n".join([*figures(stories), *campaign.problems]))
    say(f"{len(stories)} faults in {(time.monotonic() - campaign.began) / 60:.1f} min, seed {options.seed}")
    if options.results is not None:
        say(totals(options.results))
    verdicts = [judge(story) for story in stories]
    fine = all(verdict.well and verdict.cause is not False for verdict in verdicts) and not any(
        story.left for story in stories
    )
    if fine and not campaign.problems and options.folder is None:
        shutil.rmtree(folder)
    else:
        say(f"what did not come out as it must is in {folder}")
    return int(not fine or bool(campaign.problems))


if __name__ == "__main__":
    sys.exit(main())
