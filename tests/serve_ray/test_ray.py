"""Two replicas on Ray Serve, of which one is killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CODE = """
import asyncio, json, pathlib, sys
from benchmarks.serving import ray_cluster
from benchmarks.serving.replica_clients import Clients
from dsv3_jax.serve_ray.app import application
from dsv3_jax.serve_ray.settings import AppSettings
from tests.serve_ray.small_replica import SmallReplica
from tests.server.conftest import RunningServer

settings = AppSettings.of({
    "autoscaling": {"min_replicas": 2, "max_replicas": 2},
    "serve": {"max_running": 4, "max_waiting": 28},
    "resources": {"num_cpus": 0},
})

async def script(clients):
    clients.set(12)
    while len({each.replica for each in clients.outcomes}) < 2:
        await asyncio.sleep(0.05)
    ray_cluster.kill(ray_cluster.replica_processes("test")[0])
    count = len(clients.outcomes)
    while len(clients.outcomes) < count + 40:
        await asyncio.sleep(0.05)

with ray_cluster.cluster(pathlib.Path(sys.argv[1]), 1) as url:
    ray_cluster.deploy(application(settings, SmallReplica), "test")
    server = RunningServer(int(url.rpartition(":")[2]), None, None)
    figures = server.request("GET", "/metrics")[2].decode()
    clients = Clients(url, max_tokens=8)
    asyncio.run(clients.run(script))
    outcomes = [{**vars(each), "complete": each.is_complete} for each in clients.outcomes]
    print(json.dumps({
        "paths": {path: server.request("GET", path)[0] for path in ("/ready", "/v1/models", "/")},
        "figures": figures,
        "outcomes": outcomes,
        "refused": server.request("POST", "/v1/completions", {"model": "demo"})[0],
    }))
"""
