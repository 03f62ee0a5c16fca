"""The commands set JAX's allocator, unless the user has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv3_jax.cli import allocator

ROOT = Path(__file__).parents[1]

# What JAX passes to the GPU's client when a command first uses it. This needs no GPU.
CODE = """
import json, sys
from dsv3_jax.cli import main as entry
from dsv3_jax import __main__

class Command:
    @staticmethod
    def run(arguments):
        from jaxlib import xla_client
        options = xla_client.generate_pjrt_gpu_plugin_options()
        print(json.dumps({name: options.get(name) for name in ("memory_fraction", "preallocate")}))

entry.importlib.import_module = lambda name: Command
sys.exit(__main__.main())
"""


def options(*words: str, **variables: str) -> dict[str, object]:
    given = {k: v for k, v in os.environ.items() if "XLA_" not in k} | variables
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        env=given | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_command_with_a_model_reserves_almost_all():
    assert options("generate", "--prompt", "x") == {"memory_fraction": 0.95, "preallocate": None}


def test_a_command_without_a_model_reserves_nothing():
    assert options("doctor") == {"memory_fraction": 0.95, "preallocate": False}


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_users_share_stays(name):
    """Under either of its names: JAX refuses to have both."""
    assert options("serve", **{name: "0.5"})["memory_fraction"] == 0.5


def test_what_is_set_for_each_command():
    for command in ("generate", "serve", "chat", "train"):
        assert allocator.settings(command, {}) == {"XLA_CLIENT_MEM_FRACTION": "0.95"}
    for command in ("bench", "convert", "doctor", "export", "plan", "verify"):
        assert allocator.settings(command, {})["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    given = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    assert allocator.settings("doctor", given) == {}


def test_doctor_reports_what_is_set():
    lines = allocator.describe({})
    assert lines["generate, eval, serve, chat, train"] == (
        "reserve 95% of a GPU's memory when they start"
    )
    assert len(lines) == 2
    given = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PATH": "/bin"}
    assert allocator.describe(given)["set by the environment instead"] == (
        "XLA_PYTHON_CLIENT_PREALLOCATE=false"
    )
