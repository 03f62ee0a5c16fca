"""Settings of an application of replicas, their figures, and the policy of scaling."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from dsv3_jax.serve_ray.autoscaling import QueueAndCachePolicy
from dsv3_jax.serve_ray.front import merged
from dsv3_jax.serve_ray.settings import AppSettings, Autoscaling, PrefillPool


def test_flags_are_those_of_dsv3_serve():
    settings = AppSettings.of(
        {
            "model": "demo",
            "serve": {"max-running": 8, "max_waiting": 4, "draft": "mtp", "draft-depth": "auto"},
            "autoscaling": {"max_replicas": 4},
        }
    )
    arguments = settings.arguments
    assert (arguments.max_running, arguments.draft, arguments.draft_depth) == (8, "mtp", "auto")
    assert settings.max_requests == 12
    assert settings.target_ongoing_requests == 6
    assert settings.autoscaling == Autoscaling(max_replicas=4)


def test_prefill_replicas_have_flags_of_their_own():
    settings = AppSettings.of(
        {
            "serve": {"max-running": 8, "draft": "mtp", "prefill_seconds": 7},
            "prefill": {
                "serve": {"max_running": 4, "host_cache_gib": 2},
                "autoscaling": {"max_replicas": 3},
            },
        }
    )
    decode, prefill = settings.arguments, settings.prefill_arguments
    assert (decode.role, decode.max_running, decode.prefill_seconds) == ("decode", 8, 7)
    assert decode.host_cache_gib == 0
    assert (prefill.role, prefill.max_running, prefill.draft) == ("prefill", 4, "mtp")
    assert (prefill.host_cache_gib, prefill.prefill_seconds) == (2, None)
    assert settings.prefill_target_ongoing_requests == 3
    assert settings.prefill == PrefillPool(
        {"max_running": 4, "host_cache_gib": 2}, Autoscaling(max_replicas=3)
    )


def test_both_pools_have_the_same_pages_and_transfer():
    serve = {"cache_dtype": "fp8", "transfer": "jax", "draft": "mtp"}
    settings = AppSettings.of({"serve": serve, "prefill": {"serve": {"transfer": "jax"}}})
    for arguments in (settings.arguments, settings.prefill_arguments):
        assert {name: getattr(arguments, name) for name in serve} == serve
    alone = AppSettings.of({"serve": {"cache_dtype": "fp8_index"}}).arguments
    assert (alone.cache_dtype, alone.transfer) == ("fp8_index", None)
    # An n-gram drafter needs nothing of a page.
    AppSettings.of({"serve": {"draft": "ngram"}, "prefill": {"serve": {"draft": "none"}}})


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("transfer", "jax", "http"),
        ("cache_dtype", "fp8", "None"),
        ("quantization", "fp8", "None"),
        ("dtype", "float32", "None"),
        ("draft", "mtp", "none"),
        ("draft", "synthetic:0.5", "ngram"),
    ],
)
def test_pools_that_would_refuse_each_other(name, given, expected):
    message = f"^prefill: serve: {name}: expected {expected}, as in serve, got {given}$"
    other = {} if expected == "None" else {name: expected}
    with pytest.raises(ValueError, match=message):
        AppSettings.of({"serve": other, "prefill": {"serve": {name: given}}})
    message = f"^prefill: serve: {name}: expected {given}, as in serve, got {expected}$"
    if other:
        with pytest.raises(ValueError, match=message):
            AppSettings.of({"serve": {name: given}, "prefill": {"serve": other}})


def test_pools_with_other_activations_are_refused():
    """Rounded activations give other pages, and are part of a page's address."""
    values = {"serve": {"quantization": "fp8"}, "prefill": {"serve": {"activations": "float8"}}}
    with pytest.raises(ValueError, match="activations: expected None, as in serve, got float8"):
        AppSettings.of(values)


def test_open_prompts_of_prefill_replicas_count_as_requests():
    context = SimpleNamespace(
        running_replicas=["a", "b"],
        aggregated_metrics={
            "cache_usage": {"a": 0.1, "b": 0.1},
            "open_requests": {"a": 10.0, "b": 6.0, "ended": 9.0},
        },
        total_num_requests=0,
        config=SimpleNamespace(target_ongoing_requests=8),
    )
    assert QueueAndCachePolicy(0.8)(context) == (2, {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": "demo"}, "modle: expected one of model, serve"),
        ({"hosts": 0}, "hosts: expected an integer of at least 1, got 0"),
        ({"hosts": 2}, "hosts: expected a layout in serve with 2 hosts, got none"),
        (
            {"hosts": 2, "serve": {"layout": "dp_attention_ep"}, "resources": {"num_cpus": 0}},
            "resources: expected some of each of 2 hosts, got none",
        ),
        (
            {"hosts": 2, "serve": {"layout": "dp_attention_ep", "disk_cache": "/x"}},
            "disk_cache: expected none with 2 hosts, got /x; each host has a part of a page",
        ),
        (
            {"hosts": 2, "serve": {"layout": "dp_attention_ep"}, "prefill": {}},
            "prefill: expected none with 2 hosts, got one; each host has a part of a page",
        ),
        ({"serve": {"role": "prefill"}}, "serve: role: expected a flag of the engine or its API"),
        ({"serve": {"prefill_seconds": 3}}, "--prefill-seconds: expected --role decode, got both"),
        ({"prefill": {"hosts": 2}}, "hosts: expected one of serve, autoscaling, resources"),
        ({"prefill": {"serve": {"x": 1}}}, "serve: unknown argument --x"),
        ({"serve": {"max_runing": 8}}, "serve: unknown argument --max-runing; did you mean --max"),
        ({"serve": {"max_running": 0}}, "--max-running: expected an integer of at least 1, got 0"),
        ({"serve": {"max_running": "x"}}, "serve: argument --max-running: invalid int value"),
        ({"serve": {"host_cache_pinned": True}}, "--host-cache-pinned: expected --host-cache-gib"),
        ({"serve": {"transfer": "jax"}}, "--transfer: expected --role prefill or decode, got both"),
        (
            {"serve": {"transfer": "nixl"}},
            "serve: argument --transfer: expected one of http, jax; got",
        ),
        (
            {"serve": {"cache_dtype": "fp4"}},
            "serve: argument --cache-dtype: expected one of fp8, fp8",
        ),
        ({"serve": {"transfer_port": 1}}, "serve: transfer_port: expected a flag of the engine"),
        ({"serve": {"port": 80}}, "serve: port: expected a flag of the engine or its API"),
        ({"serve": {"distributed": True}}, "serve: unknown argument --distributed"),
        ({"autoscaling": {"max": 4}}, "max: expected one of min_replicas, max_replicas"),
        ({"autoscaling": {"min_replicas": 2}}, "max_replicas: expected an integer of at least min"),
        ({"autoscaling": {"target_cache_usage": 0}}, "target_cache_usage: expected a share"),
        ({"attempts": 0}, "attempts: expected an integer from 1 to 10, got 0"),
        ({"load_bound": 0.5}, "load_bound: expected a number from 1 to 100, got 0.5"),
    ],
)
def test_what_cannot_run_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        AppSettings.of(values)


@pytest.mark.parametrize(
    ("requests", "usages", "wanted"),
    [(0, [0.0], 0), (24, [0.1, 0.1], 3), (8, [0.9, 0.9, 0.6], 3), (16, [], 2)],
)
def test_queue_and_cache_decide_on_the_number_of_replicas(requests, usages, wanted):
    context = SimpleNamespace(
        running_replicas=[f"r{i}" for i in range(len(usages))],
        aggregated_metrics={
            "cache_usage": {**{f"r{i}": u for i, u in enumerate(usages)}, "ended": 1.0}
        },
        total_num_requests=requests,
        config=SimpleNamespace(target_ongoing_requests=8),
    )
    assert QueueAndCachePolicy(0.8)(context) == (pytest.approx(wanted), {})


def test_figures_of_replicas_have_their_names():
    text = (
        '# HELP vllm:running Running.\n# TYPE vllm:running gauge\nvllm:running{model_name="d"} %d\n'
        "# HELP vllm:tokens_total T.\n# TYPE vllm:tokens_total counter\nvllm:tokens_total %d\n"
    )
    lines = merged({"a": text % (1, 2), "b": text % (3, 4)}).decode().splitlines()
    assert lines.count("# TYPE vllm:running gauge") == 1
    assert 'vllm:running{model_name="d",replica="a"} 1.0' in lines
    assert 'vllm:tokens_total{replica="b"} 4.0' in lines


def test_a_front_needs_no_jax():
    code = (
        "import sys; import dsv3_jax.serve_ray.front, dsv3_jax.serve_ray.settings;"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
