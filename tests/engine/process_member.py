"""One process of an engine: ``process_member.py ACTION DIRECTORY OUT LAYOUT``, under launch_local.

DIRECTORY has a checkpoint, OUT receives the leader's address and results, LAYOUT is a preset.
"""

import json
import os
import sys
import time
from pathlib import Path

import jax

import dsv3_jax
from dsv3_jax.engine import Engine, EngineError, Follower, Leader
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.files import atomic_write
from sharding import make_layout
from sharding.distributed import initialize

KEY = b"key"
BUCKETS = Buckets(decodes=(4,), chunks=(1,), chunk_tokens=8, max_steps=1).single()


def make_engine(model, **options):
    return Engine(
        model,
        None,
        48,
        max_running=4,
        page_size=4,
        cache_tokens=128,
        draft="mtp",
        buckets=BUCKETS,
        **options,
    )


def tokens_of(engine):
    """Returns the tokens of requests, more than can run, that are greedy or sampled."""
    handles = [
        engine.submit(
            [3 + i, 9, 27] * (2 + i),
            max_new_tokens=8,
            temperature=0.8 * (i % 2),
            seed=i,
            ignore_eos=True,
        )
        for i in range(6)
    ]
    return [handle.result(200).tokens for handle in handles]


def follow(model, out: Path) -> None:
    while not (path := out / "address.json").exists():
        time.sleep(0.01)
    engine = make_engine(model, process=Follower(tuple(json.loads(path.read_text())), KEY))
    engine.warm_up()
    try:
        engine.submit([1, 2, 3])
    except EngineError as error:
        print(error, flush=True)
    engine.follow()
    engine.shutdown(drain=False)
    print("the leader has ended", flush=True)


def lead(model, out: Path, action: str) -> None:
    leader = Leader("127.0.0.1", jax.process_count() - 1, KEY)
    atomic_write(out / "address.json", json.dumps(leader.address))
    engine = make_engine(model, process=leader)
    engine.warm_up()
    leader.wait_for_followers()
    if action == "dies":
        engine.submit([1, 2, 3], max_new_tokens=40)
        os._exit(3)
    tokens = tokens_of(engine)
    if action == "serves":
        (out / "tokens.json").write_text(json.dumps(tokens))
        engine.check_integrity()
        print("compiled after warm-up:", engine.stats().compiled_after_warm_up, flush=True)
    engine.shutdown()


def main(action: str, directory: str, out: str, layout: str) -> None:
    initialize(peer_timeout_s=20)
    model, _ = dsv3_jax.load(directory, layout=make_layout(layout))
    if jax.process_index():
        follow(model, Path(out))
    else:
        lead(model, Path(out), action)


if __name__ == "__main__":
    main(*sys.argv[1:])
