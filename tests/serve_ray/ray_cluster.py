"""Ray and Ray Serve on this machine alone, as small as they can be, for measurements and tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

_STORE_BYTES = 80 * 2**20  # of shared memory; Ray takes no less
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Autoscaling then sees a load after two seconds instead of twenty.
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    # Workers are 15 below other processes otherwise, and starve on a busy machine.
    "RAY_worker_niceness": "0",
    # Ray kills its own processes when others have taken the machine's memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # A machine with few cores is slow while engines compile.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
"""Environment of Ray's processes. It has to be set before Ray is imported."""


@contextlib.contextmanager
def cluster(directory: Path, cpus: int, *, nodes: int = 1) -> Iterator[str]:
    """Starts Ray, and yields the URL of its HTTP proxy on loopback.

    Args:
      directory: for Ray's logs and sockets; its path must be short.
      cpus: cores that Ray believes in, of each node. Each replica reserves one.
      nodes: number of nodes, all of them on this machine.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    simulated = None
    if nodes == 1:
        _start(directory, cpus)
    else:
        simulated = _start_nodes(directory, cpus, nodes)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        if simulated is not None:
            simulated.shutdown()


def _start_nodes(directory: Path, cpus: int, nodes: int) -> Cluster:
    """Starts several nodes, each with processes of its own."""
    # Ray writes the address of the newest cluster into this directory, which has to exist.
    os.environ["RAY_TMPDIR"] = str(directory)
    (directory / "ray").mkdir()
    options = {
        "num_cpus": cpus,
        "object_store_memory": _STORE_BYTES,
        "include_dashboard": False,
        "temp_dir": str(directory),
    }
    simulated = Cluster(initialize_head=True, head_node_args=options)
    for _ in range(nodes - 1):
        simulated.add_node(num_cpus=cpus, object_store_memory=_STORE_BYTES)
    ray.init(address=simulated.address, log_to_driver=False)
    return simulated


def _start(directory: Path, cpus: int) -> None:
    """Starts Ray. It gives up after 30 seconds, which a busy machine may exceed, so that a second
    and a third attempt follow."""
    for attempt in range(3):
        try:
            ray.init(
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                log_to_driver=False,
                _temp_dir=str(directory),
            )
        except Exception as error:  # Ray raises no class of its own
            if "timed out during startup" not in str(error) or attempt == 2:
                raise
            ray.shutdown()
        else:
            return


def deploy(app: Any, name: str) -> None:
    """Deploys an application, or a new version of it, and waits until it runs."""
    serve.run(app, name=name, route_prefix="/")


def running_replicas(name: str, deployment: str = "engine") -> int:
    """Returns the number of an application's replicas that take requests."""
    states: Any = serve.status().applications[name].deployments[deployment].replica_states
    return states.get("RUNNING", 0)


def replica_processes(name: str, deployment: str = "engine") -> list[int]:
    """Returns the process ids of an application's replicas."""
    title = f"ray::ServeReplica:{name}:{deployment}".encode()
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if path.read_bytes().startswith(title):
                processes.append(int(path.parent.name))
    return sorted(processes)


def kill(process: int) -> None:
    """Kills a process at once."""
    os.kill(process, signal.SIGKILL)
