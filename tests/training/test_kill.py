"""Tests that runs killed by SIGKILL and resumed have the losses of an uninterrupted run."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv3_jax.training.metrics_log import Entry, read_metrics
from tests.training.tiny import CONFIG

pytestmark = pytest.mark.slow

STEPS = 40
COMMAND = "import sys; from dsv3_jax.cli.main import main; sys.exit(main(sys.argv[1:]))"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokens = np.random.default_rng(4).integers(1, 32, 3000).astype(np.uint16)
    tokens[::11] = 0
    np.savez(folder / "tokens.npz", train=tokens[:2800], held_out=tokens[2800:])
    return folder


def start(files: Path, out: Path, *arguments: str) -> subprocess.Popen[str]:
    cache = ("--compile-cache", str(files / "cache"))
    command = [sys.executable, "-c", COMMAND, "train", "--out", str(out), *cache, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def begin(files: Path, out: Path) -> subprocess.Popen[str]:
    return start(
        *(files, out, "--config", str(files / "config.json"), "--data", str(files / "tokens.npz")),
        *("--steps", str(STEPS), "--batch", "2", "--length", "12", "--log-every", "1"),
        *("--save-every", "3", "--eval-every", "10", "--eval-batches", "2"),
        *("--learning-rate", "0.01"),
    )


def kill_at(process: subprocess.Popen[str], step: int) -> None:
    """Kills the process as soon as it reports this step."""
    assert process.stderr is not None
    with process:
        for line in process.stderr:
            if line.startswith(f"dsv3: step {step}/"):
                process.kill()
    assert process.returncode == -signal.SIGKILL


def finish(process: subprocess.Popen[str]) -> None:
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


def losses(out: Path) -> dict[int, Entry]:
    """Returns the log entries by step, without their times."""
    clock = ("seconds", "tokens_per_second", "mfu", "seconds_left", "peak_memory_bytes")
    entries = read_metrics(out / "metrics.jsonl")
    assert [entry["step"] for entry in entries] == list(range(STEPS + 1))
    return {entry["step"]: {n: entry[n] for n in entry if n not in clock} for entry in entries}


def test_a_run_killed_twice_has_the_same_losses(files, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(begin(files, whole))
    steps = sorted(random.Random(20).sample(range(1, STEPS - 1), 2))
    kill_at(begin(files, killed), steps[0])
    kill_at(start(files, killed, "--resume"), steps[1])
    finish(start(files, killed, "--resume"))
    want = losses(whole)
    for step, entry in losses(killed).items():
        assert entry == want[step]
    for name in ("config.json", "model-00001-of-00001.safetensors"):
        assert (killed / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()
