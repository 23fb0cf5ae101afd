"""Tables that fit are drawn without Rich's measuring of every cell, and look as Rich draws them."""

from __future__ import annotations

import time
from random import Random

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clusterctl.cli.views import fitting
from clusterctl.cli.views.fitting import FittingTable
from clusterctl.cli.views.tables import table

Drawn = list[list[tuple[str, str]]]


def drawn_by_rich(drawn: Table, console: Console) -> Drawn:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_is_simple", lambda table: False)
        return drawn_by_us(drawn, console)


def drawn_by_us(drawn: Table, console: Console) -> Drawn:
    """Return each character with its style, by line; a space shows no style."""
    return [
        [
            (letter, str(part.style) if part.style and letter != " " else "none")
            for part in line
            for letter in part.text
        ]
        for line in console.render_lines(drawn, pad=False)
    ]


def random_table(chance: Random) -> FittingTable:
    columns = [
        f"HEAD{number}"[: chance.randint(1, 5)] + str(number) for number in range(chance.randint(1, 5))
    ]
    cells = ("", "node1", 3, "汉字", "two words", Text("failed", style="bold red"), Text("ok", style="green"))
    rows = [[chance.choice(cells) for _ in columns] for _ in range(chance.randint(0, 4))]
    drawn = table(columns, rows, right=[name for name in columns if chance.random() < 0.4])
    assert isinstance(drawn, FittingTable)
    return drawn


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_table_that_fits_looks_as_rich_draws_it(encoding: str) -> None:
    chance = Random(13)
    console = Console(width=120, force_terminal=True, color_system="standard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Console, "encoding", encoding)
        for _ in range(200):
            drawn = random_table(chance)
            assert drawn_by_us(drawn, console) == drawn_by_rich(drawn, console)


def test_cells_of_several_lines_or_styles_are_left_to_rich() -> None:
    two_styles = Text("a").append("b", style="red")
    for cell in (Text("a\nb"), Text("a\tb"), two_styles):
        console = Console(width=120, force_terminal=True, color_system="standard")
        drawn = table(["ONE", "TWO"], [[cell, 1]])
        assert drawn_by_us(drawn, console) == drawn_by_rich(drawn, console)


@pytest.mark.slow
def test_a_list_of_a_thousand_rows_takes_a_fraction_of_richs_time() -> None:
    drawn = table(["RUN", "PHASE", "STEP"], [[f"run-{number}", "finished", number] for number in range(1000)])
    console = Console(width=120, force_terminal=True, color_system="standard")
    times = []
    for draw in (drawn_by_rich, drawn_by_us):
        rounds = []
        for _ in range(3):
            began = time.process_time()
            draw(drawn, console)
            rounds.append(time.process_time() - began)
        # Other programs on the machine make single rounds slower.
        times.append(min(rounds))
    by_rich, by_us = times
    assert by_us < by_rich / 2
