"""Starts several processes on this machine, as a cluster would.

    python scripts/launch_local.py -n 4 --devices-per-process 1 -- python script.py --its arguments

The script calls ``dsv3_jax.distributed.initialize()``, or ``jax.distributed.initialize()``, with no
arguments. Each process sees ``--devices-per-process`` GPUs of its own, or, on a CPU
(``JAX_PLATFORMS=cpu``), that many simulated devices. Lines of output begin with the process's
number. When a process fails, the others have ``--grace`` seconds to exit before they are killed.
Ctrl-C ends all processes. The exit status is that of the process that failed first, or 128 plus the
signal number if a signal ended it. It is 137 if a process was killed from outside.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

_KILLED = 128 + signal.SIGKILL
_PATIENCE_S = 2.0  # after each signal: jax treats SIGTERM as a notice and does not exit


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start several processes on this machine.")
    add = parser.add_argument
    add("-n", "--processes", type=int, required=True, metavar="N")
    add("--devices-per-process", type=int, default=1, metavar="N")
    add("--grace", type=float, default=5.0, metavar="SECONDS", help="after a failure (default 5)")
    add("command", nargs="+", metavar="-- COMMAND", help="command that every process runs")
    arguments = parser.parse_args(words)
    for name in ("processes", "devices_per_process"):
        if (given := getattr(arguments, name)) < 1:
            parser.error(f"{name}: expected at least 1, got {given}")
    return arguments


def environment(number: int, processes: int, devices: int, port: int) -> dict[str, str]:
    """Returns the environment of process ``number``.

    It has the variables of Open MPI's launcher, from which jax reads the process's rank, and jax's
    own variables for the rest.
    """
    own = range(number * devices, (number + 1) * devices)
    flags = os.environ.get("XLA_FLAGS", "")
    inherited = {name: value for name, value in os.environ.items() if name != "OMPI_VERSION"}
    return inherited | {
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://127.0.0.1:{port}",
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(number),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(number),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own)),
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A child process. Threads forward its output, and put its exit status in ``ends``."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        env: Mapping[str, str],
        ends: queue.SimpleQueue[int],
    ):
        self._popen = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that signals reach its children too
        )
        out, err = self._popen.stdout, self._popen.stderr
        assert out is not None
        assert err is not None
        prefix = f"[{number}] ".encode()
        self._pumps = [
            _started(_pump, out, sys.stdout.buffer, prefix),
            _started(_pump, err, sys.stderr.buffer, prefix),
        ]
        _started(self._wait, ends)

    def _wait(self, ends: queue.SimpleQueue[int]) -> None:
        status = self._popen.wait()
        ends.put(status if status >= 0 else 128 - status)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children, even if only they still run."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def drain(self) -> None:
        """Waits until the last lines of output have been forwarded."""
        for pump in self._pumps:
            pump.join(_PATIENCE_S)


def _started(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _pump(source: IO[bytes], target: IO[bytes], prefix: bytes) -> None:
    for line in source:
        target.write(prefix + line.removesuffix(b"\n") + b"\n")
        target.flush()


def first_failure(ends: queue.SimpleQueue[int], running: int, grace: float) -> int:
    """Waits for ``running`` processes. Returns the status of the first that fails, or 0.

    After a failure it waits for at most ``grace`` seconds. The status of a killed process comes
    before others, whose ends may be noticed earlier: it did not fail because of them.
    """
    failed, until = 0, None
    for _ in range(running):
        try:
            status = ends.get(timeout=None if until is None else max(0, until - time.monotonic()))
        except queue.Empty:
            break
        if status and not failed:
            failed, until = status, time.monotonic() + grace
        if status == _KILLED:
            failed = status
    return failed


def end(processes: Sequence[Process], signals: Sequence[signal.Signals]) -> None:
    """Ends all running processes and their children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave processes behind
    for number in signals:
        for process in processes:
            process.send(number)
        until = time.monotonic() + _PATIENCE_S
        while any(process.running for process in processes) and time.monotonic() < until:
            time.sleep(0.02)
    for process in processes:
        process.drain()


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if words is None else words)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A shell makes its background processes ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    n, devices, port = arguments.processes, arguments.devices_per_process, free_port()
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    processes: list[Process] = []
    signals = [signal.SIGTERM, signal.SIGKILL]
    try:
        for number in range(n):
            env = environment(number, n, devices, port)
            processes.append(Process(number, arguments.command, env, ends))
        return first_failure(ends, n, arguments.grace)
    except OSError as error:  # no such command
        print(f"launch_local: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        signals.insert(0, signal.SIGINT)
        return 130
    finally:
        end(processes, signals)


if __name__ == "__main__":
    sys.exit(main())
