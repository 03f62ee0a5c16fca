"""A replica on two nodes of a Ray cluster, one process on each. One of them is killed."""

from __future__ import annotations

import pytest

from tests.serve_ray.scripts import result_of
from tests.support.xla_flags import fast_compilation

CODE = """
import json, os, pathlib, signal, sys, time, urllib.error, urllib.request
import ray
from tests.serve_ray import ray_cluster
from tests.serve_ray.small_replica import SmallReplica, make_small_engine
from dsv3_jax.serve_ray.app import application
from dsv3_jax.serve_ray.settings import AppSettings

SERVE = {"max_running": 4, "max_waiting": 28, "dtype": "float32"}
settings = AppSettings.of({
    "serve": {**SERVE, "layout": "dp_attention_ep"},
    "resources": {"num_cpus": 1},
    "hosts": 2,
    "health_check_period_s": 1,
})
prompts = [[300 + i] * (20 + 10 * i) for i in range(6)]

def expected():
    with make_small_engine(AppSettings.of({"serve": SERVE}).arguments).engine as engine:
        handles = [engine.submit(p, max_new_tokens=4, ignore_eos=True) for p in prompts]
        return [each.result(300).text for each in handles]

def answer_to(prompt):
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0,
            "ignore_eos": True}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["text"], answer.headers["x-replica-id"]

def followers():
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::_FollowerProcess"):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found

def answers_again(ended):
    end = time.monotonic() + 240
    while time.monotonic() < end:
        try:
            text, replica = answer_to(prompts[0])
            if replica != ended:
                return text
        except urllib.error.HTTPError as error:
            assert error.code in (502, 503), error.code
        time.sleep(1)
    return None

right = expected()
with ray_cluster.cluster(pathlib.Path(sys.argv[1]), 1, nodes=2) as url:
    ray_cluster.deploy(application(settings, SmallReplica), "test")
    answers = [answer_to(prompt) for prompt in prompts]
    groups = [each for each in ray.util.placement_group_table().values()
              if each["state"] == "CREATED"]
    (follower,) = followers()
    os.kill(follower, signal.SIGKILL)
    again = answers_again(answers[0][1])
    print(json.dumps({
        "expected": right,
        "answers": [text for text, _ in answers],
        "again": again,
        "strategies": [each["strategy"] for each in groups],
        "nodes": [len(set(each["bundles_to_node_id"].values())) for each in groups],
    }))
"""


@pytest.mark.slow
def test_a_replica_on_two_hosts():
    # Each process has one device, and not the eight that other tests simulate.
    result = result_of(CODE, JAX_PLATFORMS="cpu", XLA_FLAGS=fast_compilation())
    assert result["answers"] == result["expected"]
    assert (result["strategies"], result["nodes"]) == (["STRICT_SPREAD"], [2])
    assert result["again"] == result["expected"][0], "it is replaced when a process is lost"
