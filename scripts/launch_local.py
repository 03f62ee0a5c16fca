"""Several processes on this machine, as a cluster would start them.

    python scripts/launch_local.py -n 4 --devices-per-process 1 -- python script.py --its arguments

The script calls ``dsv3_jax.distributed.initialize()``, or ``jax.distributed.initialize()``, with no
arguments. On GPUs each process sees its own ``--devices-per-process`` of them, on a CPU
(``JAX_PLATFORMS=cpu``) as many simulated devices. Lines of output begin with the process's number.
When a process fails, the others have ``--grace`` seconds to end by themselves, then they are ended.
Ctrl-C ends all. The exit status is that of the process that failed first; of one that a signal
ended, 128 and the signal's number.
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

_PATIENCE_S = 2.0  # after each signal: jax takes SIGTERM for a notice and does not obey it


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Several processes on this machine.")
    add = parser.add_argument
    add("-n", "--processes", type=int, required=True, metavar="N")
    add("--devices-per-process", type=int, default=1, metavar="N")
    add("--grace", type=float, default=5.0, metavar="SECONDS", help="after a failure (default 5)")
    add("command", nargs="+", metavar="-- COMMAND", help="what every process runs")
    arguments = parser.parse_args(words)
    for name in ("processes", "devices_per_process"):
        if (given := getattr(arguments, name)) < 1:
            parser.error(f"{name}: expected at least 1, got {given}")
    return arguments


def environment(number: int, processes: int, devices: int, port: int) -> dict[str, str]:
    """What process ``number`` finds: the variables of Open MPI's launcher, from which jax reads
    who it is, and jax's own for what they do not say."""
    own = range(number * devices, (number + 1) * devices)
    flags = os.environ.get("XLA_FLAGS", "")
    found = {name: value for name, value in os.environ.items() if name != "OMPI_VERSION"}
    return found | {
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
    """One of them, with threads that pass on what it prints, and tell ``ends`` its exit status, as
    a shell has it, at once."""

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
            start_new_session=True,  # so that its children are ended with it
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
        """To it and its children; also where it has ended and they have not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def drain(self) -> None:
        """Waits for the last lines."""
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
    """The status of the first process that fails, 0 if none does; waits for all ``running`` ones,
    after a failure as long as ``grace`` allows."""
    failed, until = 0, None
    for _ in range(running):
        try:
            status = ends.get(timeout=None if until is None else max(0, until - time.monotonic()))
        except queue.Empty:
            break
        if status and not failed:
            failed, until = status, time.monotonic() + grace
    return failed


def end(processes: Sequence[Process], signals: Sequence[signal.Signals]) -> None:
    """All that still run, and what they have started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave some behind
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
    # What a shell starts in the background ignores Ctrl-C.
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
