"""Numbers in messages, and the progress that a terminal shows."""

import io

import pytest
from rich.console import Console

from dsv3_jax.cli.progress import Progress
from dsv3_jax.cli.waiting import Waiting
from dsv3_jax.words import counted


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 layers"), (1, "1 layer"), (2, "2 layers"), (1024, "1,024 layers")]
)
def test_a_number_has_its_noun(number, words):
    assert counted(number, "layer") == words


def test_a_terminal_shows_what_is_waited_for():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60)
    with Waiting("generating", console) as waiting:
        waiting.show("12 tokens")
    shown = out.getvalue()
    assert "dsv3: generating, 0 s, 12 tokens\n" in shown
    assert shown.endswith("\r\x1b[1A\x1b[2K")  # the line is erased


def test_a_terminal_shows_that_a_run_compiles_until_its_first_row():
    out = io.StringIO()
    with Progress(9, console=Console(file=out, force_terminal=True, width=60)) as progress:
        progress.say("9 windows")
        progress.row({"step": 1})
    shown = out.getvalue()
    assert "dsv3: 9 windows\n" in shown
    assert shown.index("dsv3: preparing the first step, 0 s") < shown.index("dsv3: step 1/9")


def test_nothing_else_shows_it(capfd):
    with Waiting("generating") as waiting:
        waiting.show("12 tokens")
    assert capfd.readouterr() == ("", "")
