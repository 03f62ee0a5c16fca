"""Several processes as one machine: the start, the end, and what each of them sees of an array.

jax's own coordination service does the work: process 0 runs it, all others hold a connection to it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_log = logging.getLogger(__name__)

# What jax says of a start without arguments where it knows no cluster.
_NO_CLUSTER = "coordinator_address should be defined"
_HALF_KNOWN = "must be defined"


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: int = 300,
    peer_timeout_s: int = 100,
) -> None:
    """Joins this process with the others of its run. Comes before anything that asks for devices.

    What is not given is found where jax finds it: SLURM, Kubernetes jobs, TPU pods, Open MPI, and
    what ``scripts/launch_local.py`` says. Where there is nothing to be found and nothing is given,
    this is the only process, and nothing happens. CPUs talk through gloo.

    From here on an exception that nobody catches ends the process at once, status 1, without the
    interpreter's last rites: jax would have it wait for the others, which wait for it.

    Args:
      coordinator: "host:port" of process 0, which listens there.
      process_id: from 0.
      timeout_s: seconds in which all processes have to arrive.
      peer_timeout_s: seconds without a sign of life after which a process counts as dead, and jax
        ends all others with status 134 (SIGABRT). Also how long a process that is through waits for
        the others at its end.

    Raises:
      ValueError: an argument is out of range, the port is taken, or arguments are missing and no
        cluster supplies them.
      TimeoutError: not all processes arrived in time. The process cannot go on from there.
      RuntimeError: called twice, or after jax has looked at its devices; or jax could not start.
    """
    _check(coordinator, num_processes, process_id, timeout_s, peer_timeout_s)
    if jax.config.jax_cpu_collectives_implementation is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    failures: list[BaseException] = []

    def join() -> None:
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                # jax ends the process when this is over; the error below comes first.
                initialization_timeout=timeout_s + _SPARE_S,
                heartbeat_timeout_seconds=peer_timeout_s,
                shutdown_timeout_seconds=peer_timeout_s,
            )
        except BaseException as error:
            failures.append(error)

    # In a thread of its own, because jax never gives up with an error that could be caught.
    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    joining.join(timeout_s)
    given = (coordinator, num_processes, process_id)
    if joining.is_alive():
        _end_at_first_error(process_id)
        raise TimeoutError(_who_is_missing(*given, timeout_s))
    if failures:
        if _NO_CLUSTER in str(failures[0]) and given == (None,) * 3:
            _log.info("a single process: no coordinator given, no cluster found")
            return
        raise _plain(failures[0], *given) from None
    _end_at_first_error(jax.process_index())
    _log.info(
        "process %d of %d, %d of %d devices",
        *(jax.process_index(), jax.process_count()),
        *(jax.local_device_count(), jax.device_count()),
    )


_SPARE_S = 3600


def host_values(tree: Any) -> Any:
    """The tree with NumPy arrays for jax.Arrays, on every process the same and whole.

    Where a part of an array lies with other processes it is gathered, and then all processes must
    call this alike. Else it is ``jax.device_get``.
    """
    return jax.device_get(jax.tree.map(_gathered, tree))


def max_over_processes(seconds: float) -> float:
    """The largest of all processes' numbers; all must call this alike."""
    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))


def barrier(where: str) -> None:
    """Until all processes have come here, which they say alike."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def _gathered(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    return multihost_utils.process_allgather(leaf, tiled=True)


def _check(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout_s: int,
    peer_timeout_s: int,
) -> None:
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"coordinator: expected 'host:port', got {coordinator!r}")
        if process_id == 0 and not _is_free(int(port)):  # jax would crash
            raise ValueError(f"coordinator: expected a free port of this host, got {port}")
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"num_processes: expected at least 1, got {num_processes}")
    if process_id is not None and not 0 <= process_id < (num_processes or sys.maxsize):
        most = "" if num_processes is None else f" to {num_processes - 1}"
        raise ValueError(f"process_id: expected 0{most or ' or more'}, got {process_id}")
    for name, seconds in (("timeout_s", timeout_s), ("peer_timeout_s", peer_timeout_s)):
        if seconds < 1:
            raise ValueError(f"{name}: expected at least 1 second, got {seconds}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as after a run that ended
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _who_is_missing(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_s: int
) -> str:
    """After the time is over: process 0, or another."""
    number = "this process" if process_id is None else f"process {process_id}"
    of = "all processes" if num_processes is None else f"all {num_processes} processes"
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    expected = f"distributed: expected {of} within {timeout_s} s, got"
    if address is None:
        return f"{expected} fewer, or no coordinator, in {number}"
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError as error:
        return f"{expected} no coordinator at {address} in {number}: {error}"
    return f"{expected} fewer at {address}; {number} is there"


def _plain(
    error: BaseException,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
) -> BaseException:
    """The error in a line of ours, where jax's own would not tell what to do."""
    if isinstance(error, ValueError) and (_NO_CLUSTER in str(error) or _HALF_KNOWN in str(error)):
        return ValueError(
            "distributed: expected coordinator, num_processes and process_id together where no"
            f" cluster supplies them, got {coordinator!r}, {num_processes} and {process_id}"
        )
    return error


def _end_at_first_error(process_id: int | None) -> None:
    show = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        number = "" if process_id is None else f" {process_id}"
        print(f"distributed: process{number} ends with {kind.__name__}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = end
