"""Runs with several processes on this machine, also with a process that is missing or dies."""

import json
import os
import queue
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import dsv3_jax
from scripts import launch_local
from sharding.distributed import host_values, initialize
from tests.sharding import model_member
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

ROOT = Path(__file__).parents[2]


def launch(*words, processes, devices=1, grace=20.0, member="member.py"):
    """Runs a member's action under launch_local; returns its status, output and seconds."""
    command = [sys.executable, "scripts/launch_local.py", "-n", processes]
    command += ["--devices-per-process", devices, "--grace", grace, "--"]
    command += [sys.executable, f"tests/sharding/{member}", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    began = time.monotonic()
    result = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return result.returncode, result.stdout + result.stderr, time.monotonic() - began


@pytest.mark.parametrize(
    ("processes", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_host_values(processes, devices):
    status, output, _ = launch("gather", processes=processes, devices=devices)
    assert status == 0, output
    for number in range(processes):
        line = f"[{number}] process {number} of {processes}: {processes * devices} devices"
        assert line in output


def test_host_values_of_one_process():
    tree = {"a": jax.numpy.arange(3), "b": np.ones(2), "c": 4}
    values = host_values(tree)
    assert values["a"].tolist() == [0, 1, 2]
    assert values["b"].tolist() == [1, 1]
    assert values["c"] == 4


# ---- one model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    config = tiny_config(num_hidden_layers=2, num_nextn_predict_layers=0)
    write_checkpoint(directory, config, random_tensors(config))
    return directory


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Logits and completions of one process with one device."""
    model, _ = dsv3_jax.load(checkpoint)
    generator = dsv3_jax.Generator(model, None, 32, batch_sizes=(4,), prefill_chunk=4)
    return np.asarray(model_member.logits(model)), model_member.completions(generator)


def results_of(directory, *words, processes, devices):
    """Returns what each process has written."""
    status, output, _ = launch(
        *words, processes=processes, devices=devices, member="model_member.py"
    )
    assert status == 0, output
    files = (directory / f"result{number}.json" for number in range(processes))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "sizes"),
    [
        (2, 2, {"expert": 2, "tensor": 2}),
        (4, 1, {"data": 2, "expert": 2}),
    ],
)
def test_the_same_model(checkpoint, alone, tmp_path, processes, devices, sizes):
    words = ("model", checkpoint, tmp_path, json.dumps(sizes))
    want, completions = alone
    for each in results_of(tmp_path, *words, processes=processes, devices=devices):
        assert each["greedy"] == completions
    for number in range(processes):
        logits = np.load(tmp_path / f"logits{number}.npy")
        assert np.abs(logits - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.slow
def test_host_reads_are_equal_in_all_processes(checkpoint, alone, tmp_path):
    words = ("reads", checkpoint, tmp_path, '{"expert": 4}')
    both = results_of(tmp_path, *words, processes=2, devices=2)
    for each in both:
        assert each["sharded"] == alone[1]
        assert each["auto"] == alone[1]
    # Measured costs decide what runs next, so they must be equal in all processes.
    assert both[0]["observed"] == both[1]["observed"]
    assert any(seconds is not None for _, seconds in both[0]["observed"])


# ---- a missing process ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (1, r"expected all processes within 3 s, got fewer at 127\.0\.0\.1:\d+; this process is"),
        pytest.param(
            0,
            r"expected all processes within 3 s, got no coordinator at 127\.0\.0\.1:\d+ in this",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_process_that_never_connects(missing, expected):
    status, output, seconds = launch("late", missing, 3, processes=2, grace=0.1)
    assert status == 1
    assert re.search(rf"^\[{1 - missing}\] TimeoutError: distributed: {expected}", output, re.M)
    assert seconds < 3 + 12


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_process_killed_while_others_compute_with_it(processes):
    status, output, seconds = launch("dies", "killed", "busy", 60, processes=processes)
    assert output.count("together") == processes
    assert status == 128 + 9
    # Either gloo or jax ends it: once gloo has ended process 0, there is no coordinator.
    for number in range(processes - 1):
        ends = rf"^\[{number}\] (distributed: process {number} ends with|.*Terminating process)"
        assert re.search(ends, output, re.M)
    assert re.search(r"Gloo .* failed: .*Connection", output)
    assert seconds < 30


@pytest.mark.parametrize(
    ("ends", "expected"), [((0, 1, 137, 1), 137), ((1, 134, 3), 1), ((0, 0), 0), ((0, 3), 3)]
)
def test_the_status_of_the_launcher(ends, expected):
    """A process that was killed is the cause, even if the end of another is noticed first."""
    statuses: queue.SimpleQueue[int] = queue.SimpleQueue()
    for status in ends:
        statuses.put(status)
    assert launch_local.first_failure(statuses, len(ends), grace=1.0) == expected


@pytest.mark.slow
def test_a_process_that_raises():
    status, output, seconds = launch("dies", "raises", "busy", 60, processes=2)
    assert status == 1
    assert "[1] RuntimeError: planted" in output
    assert "[1] distributed: process 1 ends with RuntimeError" in output
    assert "[0] distributed: process 0 ends with" in output
    assert seconds < 30


@pytest.mark.slow
def test_a_process_killed_while_others_do_nothing():
    """Only the missing heartbeats reveal a stopped process."""
    status, output, seconds = launch("dies", "killed", "idle", 6, processes=2)
    assert status == 128 + 9
    assert re.search(r"^\[0\] .*Terminating process because .* another task died", output, re.M)
    assert re.search(r"^\[0\] .*stopped sending heartbeats", output, re.M)
    assert seconds < 6 + 12


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings", "expected"),
    [
        (("host",), {}, "coordinator: expected 'host:port', got 'host'"),
        (("host:0",), {}, "coordinator: expected 'host:port', got 'host:0'"),
        ((":8000",), {}, "coordinator: expected 'host:port', got ':8000'"),
        (("host:http",), {}, "coordinator: expected 'host:port', got 'host:http'"),
        (("host:8000", 0), {}, "num_processes: expected at least 1, got 0"),
        (("host:8000", 2, 2), {}, "process_id: expected 0 to 1, got 2"),
        (("host:8000", None, -1), {}, "process_id: expected 0 or more, got -1"),
        ((), {"timeout_s": 0}, "timeout_s: expected at least 1 second, got 0"),
        ((), {"peer_timeout_s": -5}, "peer_timeout_s: expected at least 1 second, got -5"),
    ],
)
def test_arguments_out_of_range(arguments, settings, expected):
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        initialize(*arguments, **settings)


ALONE = """
import logging, socket
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
from sharding.distributed import initialize
initialize()
taken = socket.socket()
taken.bind(("", 0))
taken.listen()
address = "127.0.0.1:%d" % taken.getsockname()[1]
for arguments in [(address,), (address, 2), (address, 2, 0), (None, 2, 1)]:
    try:
        initialize(*arguments)
    except ValueError as error:
        print(str(error).replace(address, "ADDRESS").replace(address[10:], "PORT"))
import jax
print(jax.process_count(), "process")
"""


def test_a_single_process_and_incomplete_arguments():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", ALONE]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    logged = "sharding.distributed: a single process: no coordinator given, no cluster found"
    assert result.stderr.count(logged) == 1
    expected = (
        "distributed: expected coordinator, num_processes and process_id together where no cluster"
        " supplies them, got "
    )
    assert result.stdout.splitlines() == [
        f"{expected}'ADDRESS', None and None",
        f"{expected}'ADDRESS', 2 and None",
        "coordinator: expected a free port of this host, got PORT",
        f"{expected}None, 2 and 1",
        "1 process",
    ]


def test_both_names():
    assert dsv3_jax.distributed.initialize is initialize
