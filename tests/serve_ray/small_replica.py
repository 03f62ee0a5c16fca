"""A replica whose engine has few programs, for tests."""

from __future__ import annotations

import argparse

import dsv3_jax
from dsv3_jax.engine import Engine
from dsv3_jax.engine.buckets import Buckets
from dsv3_jax.serve_ray.replica import EngineReplica
from dsv3_jax.server.settings import ServerSettings
from dsv3_jax.tokenizer import Tokenizer

MAX_LEN = 256


class SmallReplica(EngineReplica):
    """The demo's engine with one program."""

    def make_engine(
        self, arguments: argparse.Namespace
    ) -> tuple[Engine, Tokenizer, ServerSettings]:
        """Returns the engine, its tokenizer, and the settings of its server."""
        model, tokenizer = dsv3_jax.load("demo")
        assert tokenizer is not None
        buckets = Buckets(decodes=(4,), chunks=(1,), chunk_tokens=32, max_steps=1).single()
        engine = Engine(model, tokenizer, MAX_LEN, max_running=4, buckets=buckets)
        return engine, tokenizer, ServerSettings("demo", MAX_LEN, max_requests=32)
