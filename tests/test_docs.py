"""Links between documents lead to files that exist, and every page can be reached from the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TOP = ("README.md", "README.zh.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [
    *(ROOT / name for name in TOP if (ROOT / name).exists()),
    *sorted(DOCS.rglob("*.md")),
    ROOT / "examples" / "README.md",
]
# Paths of this repository in prose, as in `trainer/train/loop.py`.
IN_PROSE = re.compile(
    r"`((?:clusterctl|trainer|native|bench|tests|docs|examples|rank_tables)/[\w./-]*\w\.(?:py|md|yaml|cpp|h))`"
)


def links(page: Path) -> list[str]:
    """Return the targets of a page's links to other files, without their anchors."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = (target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text))
    return [target for target in targets if target and not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    missing = [target for target in links(page) if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_source_files_named_in_prose_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        pytest.skip("older entries name files as they were called then")
    named = IN_PROSE.findall(page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", ["launch.md", "training-step.md"])
def test_functions_named_next_to_their_file_exist(page: str) -> None:
    text = (DOCS / "internals" / page).read_text(encoding="utf-8")
    rows = re.findall(r"\| `([\w/]+\.(?:py|cpp))` \| `(\w+)` \|", text)
    assert len(rows) > 15
    missing = []
    for file, name in rows:
        source = (ROOT / file).read_text(encoding="utf-8")
        if not re.search(rf"(?:def |class |^|void ){name}\b[^\n]*[(:=]", source, re.MULTILINE):
            missing.append(f"{file}: {name}")
    assert not missing


def test_the_templates_and_the_workflow_are_valid() -> None:
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path.name
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert ".ci/run" in [step.get("run") for step in workflow["jobs"]["test"]["steps"]]


def test_type_information_is_installed_with_every_package() -> None:
    installed = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("package-data]")[2]
    for package in ("clusterctl", "trainer", "native"):
        assert (ROOT / package / "py.typed").is_file()
        assert f'{package} = ["py.typed"]' in installed


def test_the_index_leads_to_every_page() -> None:
    reached: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        waiting += [(page.parent / target).resolve() for target in links(page)]
    assert not {page.relative_to(ROOT).as_posix() for page in DOCS.rglob("*.md")} - {
        page.relative_to(ROOT).as_posix() for page in reached
    }


# Words that readers stumbled over; CONTRIBUTING.md asks for the usual terms of the field.
UNCLEAR = re.compile(
    r"\b(beside|what is none|whatever comes|for want of|by then|is told|are told|is said|are said|is asked for"
    r"|mended|goes on|go on|comes home|brought home|brings home|stands by|as it comes)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_use_the_usual_words(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    unclear = [f"{number}: {line}" for number, line in enumerate(lines, 1) if UNCLEAR.search(line)]
    assert not unclear
