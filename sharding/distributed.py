"""Start and end of a run with several processes, and host values of arrays that span processes.

It uses jax's coordination service. Process 0 runs the service; all others keep a connection to it.
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

# Parts of jax's messages: no argument was given and jax detects no cluster, or some are missing.
_NO_CLUSTER = "coordinator_address should be defined"
_INCOMPLETE = "must be defined"

# jax aborts the process at its own timeout. This much more time lets our TimeoutError come first.
_EXTRA_TIMEOUT_S = 3600


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_s: int = 300,
    peer_timeout_s: int = 100,
) -> None:
    """Joins this process with the other processes of its run.

    Call it before anything that asks jax for devices. jax detects missing arguments under SLURM,
    Kubernetes jobs, TPU pods and Open MPI, and in processes that ``scripts/launch_local.py``
    started. Without arguments and without a cluster, this is the only process, and nothing happens.
    On CPUs the collectives use gloo.

    After this call an uncaught exception ends the process at once with status 1 and without the
    interpreter's shutdown. jax's shutdown would wait for the other processes, which wait for this
    one.

    Args:
      coordinator: "host:port" of process 0, which listens there.
      num_processes: number of processes of the run.
      process_id: number of this process, from 0.
      timeout_s: seconds within which all processes must connect.
      peer_timeout_s: seconds without a heartbeat after which a process counts as dead. jax then
        ends all others with status 134 (SIGABRT). A process that finishes also waits this long for
        the others.

    Raises:
      ValueError: an argument is out of range, the port is in use, or arguments are missing and no
        cluster supplies them.
      TimeoutError: not all processes connected in time. The process cannot continue after it.
      RuntimeError: it was called twice, jax has already initialised its devices, or jax failed.
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
                initialization_timeout=timeout_s + _EXTRA_TIMEOUT_S,
                heartbeat_timeout_seconds=peer_timeout_s,
                shutdown_timeout_seconds=peer_timeout_s,
            )
        except BaseException as error:
            failures.append(error)

    # jax runs in a thread because its own timeout raises no exception that could be caught.
    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    joining.join(timeout_s)
    given = (coordinator, num_processes, process_id)
    if joining.is_alive():
        _exit_on_uncaught_exception(process_id)
        raise TimeoutError(_timeout_message(*given, timeout_s))
    if failures:
        if _NO_CLUSTER in str(failures[0]) and given == (None,) * 3:
            _log.info("a single process: no coordinator given, no cluster found")
            return
        raise _with_plain_message(failures[0], *given) from None
    _exit_on_uncaught_exception(jax.process_index())
    _log.info(
        "process %d of %d, %d of %d devices",
        *(jax.process_index(), jax.process_count()),
        *(jax.local_device_count(), jax.device_count()),
    )


def host_values(tree: Any) -> Any:
    """Returns the tree with NumPy arrays in place of jax.Arrays, complete and equal on every
    process.

    Arrays with shards on other processes are gathered; all processes must then call this together.
    For other arrays it is ``jax.device_get``.
    """
    return jax.device_get(jax.tree.map(_gathered, tree))


def max_over_processes(number: float) -> float:
    """Returns the largest number that any process passes. All processes must call it together."""
    return float(np.max(multihost_utils.process_allgather(np.float32(number))))


def barrier(name: str) -> None:
    """Waits until all processes have called it with the same ``name``."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


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
    """Raises ValueError for an argument of :func:`initialize` that is out of range."""
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
        # A port may be reused directly after the run that had it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _timeout_message(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_s: int
) -> str:
    """Returns the error message after a timeout: either process 0 or another one is missing."""
    number = "this process" if process_id is None else f"process {process_id}"
    all_processes = "all processes" if num_processes is None else f"all {num_processes} processes"
    address = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    expected = f"distributed: expected {all_processes} within {timeout_s} s, got"
    if address is None:
        return f"{expected} fewer, or no coordinator, in {number}"
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError as error:
        return f"{expected} no coordinator at {address} in {number}: {error}"
    return f"{expected} fewer at {address}; {number} is there"


def _with_plain_message(
    error: BaseException,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
) -> BaseException:
    """Returns an error with our message in place of one of jax's that does not say what to do."""
    if isinstance(error, ValueError) and (_NO_CLUSTER in str(error) or _INCOMPLETE in str(error)):
        return ValueError(
            "distributed: expected coordinator, num_processes and process_id together where no"
            f" cluster supplies them, got {coordinator!r}, {num_processes} and {process_id}"
        )
    return error


def _exit_on_uncaught_exception(process_id: int | None) -> None:
    """Installs an exception hook that ends the process without the interpreter's shutdown."""
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous_hook(kind, error, trace)
        number = "" if process_id is None else f" {process_id}"
        print(f"distributed: process{number} ends with {kind.__name__}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook
