"""The launcher, with commands that need no jax."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[2] / "scripts" / "launch_local.py"

SAY = (
    "import os, sys; at = os.environ; print(at['OMPI_COMM_WORLD_RANK'], 'of',"
    " at['OMPI_COMM_WORLD_SIZE'], 'sees', at['JAX_LOCAL_DEVICE_IDS'], sys.argv[1:]);"
    " print('two', end='', file=sys.stderr)"
)
NUMBER = "import os, sys, time; n = int(os.environ['OMPI_COMM_WORLD_RANK']);"


def launch(*words, timeout=30):
    command = [sys.executable, str(LAUNCHER), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def python(n, code, *words):
    return "-n", n, "--grace", 0.2, "--", sys.executable, "-c", code, *words


def test_lines_begin_with_the_number():
    words = python(2, SAY, "--flag", "-n")
    result = launch("--devices-per-process", 2, *words)
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == [
        "[0] 0 of 2 sees 0,1 ['--flag', '-n']",
        "[1] 1 of 2 sees 2,3 ['--flag', '-n']",
    ]
    assert sorted(result.stderr.splitlines()) == ["[0] two", "[1] two"]


def test_status_of_the_first_that_fails():
    code = NUMBER + "time.sleep(0.4 * n); sys.exit(3 + n)"
    result = launch(*python(3, code))
    assert result.returncode == 3


def test_all_end_when_one_fails():
    began = time.monotonic()
    result = launch(*python(2, NUMBER + "n or sys.exit(7); print('began'); time.sleep(60)"))
    assert result.returncode == 7
    assert "[1] began" in result.stdout
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_a_process_that_ignores_sigterm_and_its_child():
    code = NUMBER + (
        "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " n or (time.sleep(0.5), sys.exit(7));"
        " p = subprocess.Popen(['sleep', '60']); print(p.pid); p.wait()"
    )
    result = launch(*python(2, code))
    assert result.returncode == 7
    assert is_gone(re.findall(r"\[1\] (\d+)", result.stdout)[0])


def is_gone(pid: str) -> bool:
    """A process that has ended but was not waited for does not count as running."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_signal_counts_as_a_shell_counts_it():
    result = launch(*python(1, "import os; os.kill(os.getpid(), 9)"))
    assert result.returncode == 128 + 9


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all(number, status):
    command = [sys.executable, str(LAUNCHER)]
    command += map(str, python(2, "import time; print('began'); time.sleep(60)"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as result:
        assert result.stdout is not None
        assert {result.stdout.readline(), result.stdout.readline()} == {
            b"[0] began\n",
            b"[1] began\n",
        }
        result.send_signal(number)
        assert result.wait(15) == status


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-n", "0", "--", "true"), "processes: expected at least 1, got 0"),
        (("-n", "1", "--devices-per-process", "0", "--", "true"), "devices_per_process: expected"),
        (("-n", "1"), "required: -- COMMAND"),
        (("-n", "1", "--", "no-such-command"), "no-such-command"),
    ],
)
def test_bad_usage(words, expected):
    result = launch(*words)
    assert result.returncode == 2
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
