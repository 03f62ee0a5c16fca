"""Two replicas on Ray Serve. One of them is killed."""

from __future__ import annotations

import re

import pytest

from tests.serve_ray.scripts import result_of

CODE = """
import asyncio, json, pathlib, sys, urllib.error, urllib.request
from tests.serve_ray import ray_cluster
from tests.serve_ray.replica_clients import Clients
from dsv3_jax.serve_ray.app import application
from dsv3_jax.serve_ray.settings import AppSettings
from tests.serve_ray.small_replica import SmallReplica

settings = AppSettings.of({
    "autoscaling": {"min_replicas": 2, "max_replicas": 2},
    "serve": {"max_running": 4, "max_waiting": 28},
    "resources": {"num_cpus": 0},
})

def get(path, body=None):
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode("utf-8")
    except urllib.error.HTTPError as error:
        return error.code, ""

async def script(clients):
    clients.set(10)
    while len({each.replica for each in clients.outcomes}) < 2:
        await asyncio.sleep(0.05)
    ray_cluster.kill(ray_cluster.replica_processes("test")[0])
    count = len(clients.outcomes)
    while len(clients.outcomes) < count + 16:
        await asyncio.sleep(0.05)

with ray_cluster.cluster(pathlib.Path(sys.argv[1]), 1) as url:
    ray_cluster.deploy(application(settings, SmallReplica), "test")
    figures = get("/metrics")[1]
    clients = Clients(url, max_tokens=4)
    asyncio.run(clients.run(script))
    outcomes = [{**vars(each), "complete": each.is_complete} for each in clients.outcomes]
    print(json.dumps({
        "paths": {path: get(path)[0] for path in ("/ready", "/v1/models", "/")},
        "figures": figures,
        "outcomes": outcomes,
        "refused": get("/v1/completions", b"{}")[0],
    }))
"""


@pytest.mark.slow
def test_a_killed_replica_costs_only_streams_that_have_begun():
    result = result_of(CODE)
    assert result["paths"] == {"/ready": 200, "/v1/models": 200, "/": 200}
    assert result["refused"] == 400
    replicas = set(re.findall(r'vllm:num_requests_running\{.*replica="(\w+)"\}', result["figures"]))
    assert len(replicas) == 2
    outcomes = result["outcomes"]
    assert replicas <= {each["replica"] for each in outcomes}
    assert sum(each["attempts"] > 1 and each["complete"] for each in outcomes) >= 1
    for each in outcomes:
        if not each["complete"]:
            assert (each["status"], each["streamed"], each["has_begun"]) == (200, True, True)
            assert each["error"] == "request: its replica was lost; try again"
