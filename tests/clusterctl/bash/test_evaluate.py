"""Scripts followed without running them: the same words as bash gives a program, and the reasons for unknown ones."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from clusterctl.bash.evaluate import evaluate
from clusterctl.bash.evaluator import Script
from clusterctl.bash.texts import shown
from clusterctl.errors import InputFaults

BASH = shutil.which("bash") or ""
CASES = Path(__file__).resolve().parents[3] / "tests" / "cases" / "bash" / "scripts.sh"
# The sections of the file, each a script of its own.
SCRIPTS = dict(part.split("\n", 1) for part in CASES.read_text().split("#### ")[1:])


@pytest.mark.skipif(not BASH, reason="no bash")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_that_bash_gives_a_program(name: str, tmp_path: Path) -> None:
    show = tmp_path / "show"
    show.write_text(f"#!{BASH}\nprintf '<%s>' \"$@\" >> {tmp_path}/shown\necho >> {tmp_path}/shown\n")
    show.chmod(0o755)
    script = SCRIPTS[name]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run([BASH, "-c", script], cwd=tmp_path, env=environment, check=False, timeout=30)
    for left in ("f.txt", "g.txt"):
        (tmp_path / left).unlink(missing_ok=True)
    followed = evaluate(script, "the command")
    lines = [
        "".join(f"<{word.text}>" for word in command.words[1:])
        for command in followed.commands
        if command.words[0].text == "show"
    ]
    expected = (tmp_path / "shown").read_text()
    # printf shows one empty word where there is none.
    assert "\n".join(line or "<>" for line in lines) + "\n" == expected
    assert not followed.unknown


def of(text: str, path: Path | None = None) -> Script:
    return evaluate(text, str(path) if path else "the command", path)


def words(script: Script) -> list[str]:
    commands = [command for command in script.commands if not command.followed]
    return [shown(" ".join(word.text for word in command.words)) for command in commands]


@pytest.mark.parametrize(
    "line", ["[[ $H =~ *e ]]", "[[ $H =~ (e+)+x ]]", "[[ $H == e[z-a] ]]", "[[ $H == *e*e*e*e*e*e*e*e*e*x ]]"]
)
def test_patterns_that_are_invalid_or_take_minutes_are_unknown(line: str) -> None:
    script = of(f"H={'e' * 200}\nN=1; if {line}; then N=2; fi\nrun $N\n")
    assert words(script)[-1] == "run $N"
    pattern = line.split()[3]
    script = of(f"H={'e' * 200}\ncase $H in {pattern}) N=2;; *) N=1;; esac\nrun $N ${{H%%{pattern}}}\n")
    if "=~" not in line:
        assert words(script)[-1] == f"run $N ${{H%%{pattern}}}"


def test_huge_numbers_and_ranges_take_no_time() -> None:
    began = time.process_time()
    script = of("for i in {1..99999999}; do :; done\nrun $((1 << 99999999999)) $((2**999999))\n")
    assert words(script)[-1] == "run $((1 << 99999999999)) $((2**999999))"
    assert time.process_time() - began < 5


def test_what_depends_on_the_machine_is_unknown_and_listed() -> None:
    script = of(
        'A=1; O=\'--a 1\'\nif [ -f /etc/x ]; then A=2; O="$O --b"; else O="$O --c"; fi\n'
        "B=$(hostname)\nrun $A $O $B ${C} ${D:-d} $((E * 2)) $1\n"
    )
    assert words(script)[-1] == "run $A --a 1 $O $(hostname) $C d $((E * 2)) $1"
    reason = script.reasons(script.commands[-1].words)["the command:2"]
    assert "A is " in reason and "-f /etc/x" in reason
    assert not script.reasons(of("run a").commands[0].words)


def test_a_script_is_taken_to_work_where_it_would_end_with_an_error() -> None:
    script = of('if [ -z "$1" ]; then echo usage; exit 1; fi\n[ -f x ] || exit 2\nrun a\n')
    assert words(script) == ["run a"] and script.commands[0].certain
    assert "the script would end at the command:1" in script.unknown["the command:1"].text


def test_other_files_are_followed_with_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "model.sh").write_text(
        'here=$(dirname $BASH_SOURCE)\nMODEL="--layers ${N:-2} --json $here/ds.json"\n'
    )
    (tmp_path / "start.sh").write_text(
        '#!/bin/bash\nN=12\nsource $1\nbash ${2:-none.sh} "a b" &\nrun $MODEL $0\n'
    )
    (tmp_path / "inner.sh").write_text('run inner "$1" $# $N\n')
    script = of(f"bash {tmp_path}/start.sh config/model.sh inner.sh")
    here = tmp_path / "config"
    assert words(script) == [
        "run inner a b 1 12",
        f"run --layers 12 --json {here}/ds.json {tmp_path}/start.sh",
    ]
    assert script.commands[2].words[0].where == f"{tmp_path}/start.sh:5"
    script = of((tmp_path / "start.sh").read_text(), tmp_path / "start.sh")
    assert "which file this is, is not known" in script.unknown[f"{tmp_path}/start.sh:3"].text
    assert words(script)[-1].startswith("run $MODEL")


def test_nothing_is_run_and_hostile_texts_end_soon(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    script = of(
        f"A=$(touch {mark}); touch {mark}; `touch {mark}`; eval touch {mark}; while true; do :; done; run $A\n"
    )
    assert not mark.exists() and words(script)[-1].startswith("run $(touch")
    double = "A=xxxxxxxxxx; " + "A=$A$A; " * 60 + "run $A"
    assert len(of(double).commands[0].words[1].text) < 10_000
    assert of("f() { f; }; f; run").commands or True
    with pytest.raises(InputFaults, match="steps"):
        of("for a in {1..200}; do for b in {1..200}; do for c in {1..200}; do :; done; done; done")
    for text in (
        "$(" * 3000,
        "${" * 3000,
        "((" * 3000,
        "`" * 999,
        "a\x00b",
        "case x in",
        "<<EOT",
        '"$("',
        "\ue000x\ue001",
    ):
        with contextlib.suppress(InputFaults):
            of(text)
