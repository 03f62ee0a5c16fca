"""Replicas of the demo whose engine has one program, so that several start soon on few cores."""

from __future__ import annotations

import argparse

import dsv3_jax
from dsv3_jax.cli.flags import draft_of
from dsv3_jax.cli.loading import make_layout_from
from dsv3_jax.cli.run_server import MadeEngine, prefill_key_of, remote_of, tiers_of
from dsv3_jax.engine import Engine, Follower, Leader
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.serve_ray.replica import EngineReplica, PrefillReplica
from dsv3_jax.server.service import ServerSettings

MAX_LEN = 256


def make_small_engine(
    arguments: argparse.Namespace,
    process: Leader | Follower | None = None,
    *,
    max_len: int = MAX_LEN,
) -> MadeEngine:
    """Returns an engine of the demo with few programs, and what its server needs."""
    layout = make_layout_from(arguments)
    model, tokenizer = dsv3_jax.load(
        "demo", dtype=arguments.dtype, cache_dtype=arguments.cache_dtype, layout=layout
    )
    assert tokenizer is not None
    slots = arguments.max_running
    shards = 1 if layout is None else layout.num_shards("batch")
    buckets = Buckets(
        decodes=(slots // shards,), chunks=(1,), chunk_tokens=32, max_steps=1
    ).single()
    remote = remote_of(arguments, model, prefill_key_of(arguments))
    engine = Engine(
        model,
        tokenizer,
        max_len,
        max_running=slots,
        **draft_of(arguments),
        buckets=buckets,
        tiers=tiers_of(arguments, remote),
        process=process,
    )
    settings = ServerSettings(
        "demo",
        max_len,
        max_requests=slots + arguments.max_waiting,
        program_store=arguments.program_store,
    )
    return MadeEngine(engine, tokenizer, settings, remote)


class SmallReplica(EngineReplica):
    """A replica of the demo with few programs."""

    @staticmethod
    def make_engine(
        arguments: argparse.Namespace, process: Leader | Follower | None = None
    ) -> MadeEngine:
        """Returns the engine and what its server needs."""
        return make_small_engine(arguments, process)


class SmallPrefillReplica(PrefillReplica):
    """A prefill replica of the demo with few programs."""

    @staticmethod
    def make_engine(
        arguments: argparse.Namespace, process: Leader | Follower | None = None
    ) -> MadeEngine:
        """Returns the engine and what its server needs."""
        return make_small_engine(arguments, process)
