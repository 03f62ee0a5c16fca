"""Numbers in messages, and progress on a terminal."""

import io
import logging
import re
import time

import pytest
from rich.console import Console

from dsv3_jax.cli import progress as progress_lines
from dsv3_jax.cli.progress import StatusLine, TrainingProgress
from dsv3_jax.words import counted


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 layers"), (1, "1 layer"), (2, "2 layers"), (1024, "1,024 layers")]
)
def test_a_number_has_its_noun(number, words):
    assert counted(number, "layer") == words


def test_a_terminal_shows_a_status_line():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60)
    with StatusLine("generating", console) as status:
        status.show("12 tokens")
    shown = out.getvalue()
    assert "dsv3: generating, 0 s, 12 tokens\n" in shown
    assert shown.endswith("\r\x1b[1A\x1b[2K")  # the line is erased


def test_a_terminal_shows_that_a_run_prepares_until_its_first_row():
    out = io.StringIO()
    with TrainingProgress(9, console=Console(file=out, force_terminal=True, width=60)) as progress:
        progress.print("9 windows")
        progress.show({"step": 1})
    shown = out.getvalue()
    assert "dsv3: 9 windows\n" in shown
    assert shown.index("dsv3: preparing the first step, 0 s") < shown.index("dsv3: step 1/9")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_held_out_loss_is_that_of_its_step(is_terminal):
    """A log has it on the lines of the steps that measured it. A terminal's has it and its step."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=120)
    losses = {"main": 2.5, "mtp": 2.0, "mtp_agreement": 0.5}
    with TrainingProgress(9, console=console) as progress:
        for entry in (
            {"step": 0, "held_out": {"main": 3.25}},
            {"step": 1, "losses": losses},
            {"step": 2, "losses": losses, "held_out": {"main": 3.125}},
        ):
            progress.show(entry)
            shown, step = out.getvalue().split("dsv3: ")[-1], entry["step"]
            assert shown.startswith(f"step {step}/9")
            expected = ("held out 3.2500", "held out 3.2500 at step 0", "held out 3.1250")[step]
            parts = [part.strip() for part in shown.split(", ")]
            is_shown = is_terminal or step != 1
            assert [part for part in parts if "held out" in part] == [expected] * is_shown


def test_only_a_terminal_shows_a_status_line(capfd):
    with StatusLine("generating") as status:
        status.show("12 tokens")
    assert capfd.readouterr() == ("", "")


def test_what_is_logged_appears_above_the_status_line():
    out = io.StringIO()
    with StatusLine("compiling", Console(file=out, force_terminal=True, width=60)):
        logging.getLogger("dsv3_jax.compile_cache").warning("compiling 2 programs")
    assert "dsv3: compiling 2 programs\n" in out.getvalue()
    assert not logging.getLogger("dsv3_jax").handlers


def test_without_a_terminal_the_line_is_printed_now_and_then(monkeypatch):
    """Its seconds depend on the machine."""
    monkeypatch.setattr(progress_lines, "_PRINT_SECONDS", 0.001)
    out = io.StringIO()
    with StatusLine("loading demo", Console(file=out, width=60)):
        end = time.monotonic() + 60
        while not re.match(r"dsv3: loading demo, \d+ s\n", out.getvalue()):
            assert time.monotonic() < end
            time.sleep(0.001)
