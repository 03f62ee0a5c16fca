"""Conversions that are killed or interrupted are resumed to the same bytes."""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from dsv3_jax.checkpoint.convert import convert
from tests.checkpoint.interrupted.conversions import (
    MANIFEST,
    TARGETS,
    assert_whole,
    fp8_checkpoint,
    journal_lines,
    refusal,
)
from tests.support import children
from tests.support.checkpoints import tiny_config
from tests.support.children import Child
from tests.support.trees import snapshot

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory) -> Path:
    """Returns a model with 128 experts, each large enough to have a file of its own in a store."""
    config = tiny_config(
        hidden_size=160,
        moe_intermediate_size=128,
        n_routed_experts=64,
        num_hidden_layers=2,
    )
    return fp8_checkpoint(tmp_path_factory.mktemp("many") / "source", config)


def wait_for_lines(child: Child, store: Path, lines: int) -> None:
    until = time.monotonic() + 120
    while child.running and journal_lines(store) < lines:
        assert time.monotonic() < until, child.output
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_killed_at_random_moments(many_experts, tmp_path, target):
    """Sends SIGKILL at a random time after a number of journal lines, and resumes."""
    whole, store = tmp_path / "whole", tmp_path / "store"
    before = snapshot(many_experts)
    slowly = partial(children.slow_reads, 0.001)
    command = ("convert", many_experts, store, "--to", target)
    undisturbed = Child(tmp_path / "log", *command[:2], whole, *command[3:], hook=slowly)
    began, lines = time.monotonic(), 0
    while undisturbed.running:
        lines = max(lines, journal_lines(whole))
    assert undisturbed.wait() == 0, undisturbed.output
    assert lines > 300
    per_line = (time.monotonic() - began) / lines
    kills = 20
    rng = random.Random(f"{target}, {kills}")
    at = []
    for moment in sorted(rng.sample(range(1, lines - 20), kills)):
        resume = ("--resume",) if store.exists() else ()
        child = Child(tmp_path / "log", *command, *resume, hook=slowly)
        wait_for_lines(child, store, moment)
        time.sleep(rng.uniform(0, 4 * per_line))
        child.kill()
        assert child.wait() == -signal.SIGKILL, child.output
        assert not (store / MANIFEST).exists()
        at.append(journal_lines(store))
    assert at == sorted(at)
    assert len(set(at)) > kills // 2
    child = Child(tmp_path / "log", *command, "--resume")
    assert child.wait() == 0, child.output
    assert_whole(store, whole)
    assert snapshot(many_experts) == before


@pytest.mark.slow
def test_a_killed_process_of_the_system(many_experts, tmp_path):
    """Every run has an interpreter of its own, as for users."""
    script = (
        "import os, sys, time\n"
        "read = os.preadv\n"
        "def slowly(*arguments):\n"
        "    time.sleep(0.005)\n"
        "    return read(*arguments)\n"
        "os.preadv = slowly\n"
        "from dsv3_jax.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    whole, store = tmp_path / "whole", tmp_path / "store"
    convert(many_experts, whole, "bf16")
    arguments = ["convert", str(many_experts), str(store), "--to", "bf16", "--resume"]
    for moment in (2, 100, 300):
        process = subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=ROOT)
        with process:
            while process.poll() is None and journal_lines(store) < moment:
                time.sleep(0.001)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert not (store / MANIFEST).exists()
    subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, check=True)
    assert_whole(store, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "edge", "middle"), [(target, 10, 8) for target in ("fp8", "int4")]
)
def test_killed_at_every_kind_of_call(sound, wholes, tmp_path, target, edge, middle):
    """Kills the process from inside, at calls that create the store, write headers, or complete it.

    Chunks are written by native code, which the tests above interrupt.
    """
    store, touched = tmp_path / "store", tmp_path / "touched"
    command = ("convert", sound, store, "--to", target)
    counting = partial(children.counts_touches, str(store), str(touched))
    child = Child(tmp_path / "log", *command, hook=counting)
    assert child.wait() == 0, child.output
    assert_whole(store, wholes[target])
    shutil.rmtree(store)
    count = len(touched.read_text().splitlines())
    assert count > 30
    between = random.Random(5).sample(range(edge + 1, count - edge), middle)
    died = 0
    for number in (*range(1, edge + 1), *sorted(between), *range(count - edge, count + 1)):
        dying = partial(children.dies_at, str(store), number)
        child = Child(tmp_path / "log", *command, "--resume", hook=dying)
        status = child.wait()
        assert status in (-signal.SIGKILL, 0), child.output  # calls vary with several threads
        died += status != 0
        child = Child(tmp_path / "log", *command, "--resume")
        assert child.wait() == 0, child.output
        assert_whole(store, wholes[target])
        shutil.rmtree(store)
    assert died >= 2 * edge


def test_control_c(sound, wholes, tmp_path):
    store = tmp_path / "store"
    command = ("convert", sound, store, "--to", "fp8")
    # Half a minute without interruption, which is longer than any pause of this process.
    child = Child(tmp_path / "log", *command, hook=partial(children.slow_reads, 0.4))
    wait_for_lines(child, store, 2)
    child.interrupt()
    assert child.wait() == 130, child.output
    assert "Traceback" not in child.output
    assert not (store / MANIFEST).exists()
    convert(sound, store, "fp8", resume=True)
    assert_whole(store, wholes["fp8"])


@pytest.mark.slow
def test_two_at_once(many_experts, tmp_path):
    """The second conversion is refused, and the first one is not disturbed."""
    store, whole = tmp_path / "store", tmp_path / "whole"
    command = ("convert", many_experts, store, "--to", "fp8", "--resume")
    first = Child(tmp_path / "log", *command, hook=partial(children.slow_reads, 0.002))
    wait_for_lines(first, store, 5)
    assert re.search(r"store.* another process", refusal(many_experts, store, "fp8", resume=True))
    assert first.wait() == 0, first.output
    convert(many_experts, whole, "fp8")
    assert_whole(store, whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("target", ["fp8", "int4"])
def test_workers_do_not_matter(sound, wholes, store, target, workers):
    convert(sound, store, target, workers=workers)
    assert_whole(store, wholes[target])
