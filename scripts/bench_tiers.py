"""Measures the tiers of an engine's cache, and tries to make the one on disk return a wrong page.

    python -m scripts.bench_tiers --rounds 5 --out benchmarks/results/tiers_demo_cpu.json
    python -m scripts.bench_tiers --model moonlight-16b --prefix 8000 --kills 0 --flips 0 \\
        --exchange-seconds 0 --pinned --out benchmarks/results/tiers_moonlight_h200.json

First the damage: writers are killed at random moments, bits of files are flipped, and two
processes share a directory. It ends with an error if any page comes back with other contents than
were stored.

Then the time to the first token of one request, with ``--prefix`` tokens that were there before and
``--suffix`` new ones. The prefix comes from the device, from host memory, from files that the
operating system has in memory, from files that it has not, or is computed. Every round does all of
these in turn, and the results are medians. The first round compiles what the others run. With a
prefix hit, the tokens must be the same wherever the prefix comes from. Whether they are those of
the computed prompt is reported: in bfloat16, chunks that begin elsewhere round otherwise.
``--pinned`` then measures a second engine, whose host memory is pinned.

A model has published widths and random weights; ``demo`` is the trained checkpoint of this package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dsv3_jax
from benchmarks.decode import machine, models
from benchmarks.serving import page_damage
from dsv3_jax.engine import CacheTiers, Engine
from dsv3_jax.files import atomic_write
from dsv3_jax.model import DeepSeekV3

_NEW_TOKENS = 8
_SECONDS = 900.0


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the tiers of an engine's cache.")
    parser.add_argument("--model", default="demo", help=f"demo, {models.HELP}")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens that were there before")
    parser.add_argument("--suffix", type=int, default=32, help="new tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pinned", action="store_true", help="then also with pinned host memory")
    parser.add_argument("--draft", choices=("mtp", "ngram"))
    parser.add_argument(
        "--directory", type=Path, help="directory for files; default a temporary one"
    )
    parser.add_argument("--kills", type=int, default=20, help="writers to kill")
    parser.add_argument("--flips", type=int, default=100, help="bits to flip")
    parser.add_argument("--exchange-seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def damage(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the number of attempts of each kind, and how many pages were right."""
    done: dict[str, Any] = {}
    if arguments.kills:
        done["kills"] = page_damage.kill_writers(directory / "kills", arguments.kills)
    if arguments.flips:
        done["flips"] = page_damage.flip_bits(directory / "flips", arguments.flips)
    if arguments.exchange_seconds:
        shared = directory / "processes"
        done["two_processes"] = page_damage.two_processes(shared, arguments.exchange_seconds)
    return done


def load(name: str) -> DeepSeekV3:
    """Returns the demo, or a model with published widths and random weights."""
    if name == "demo":
        return dsv3_jax.load("demo")[0]
    config = models.config(name)
    return models.random_model(models.shapes(config, "bf16", jnp.bfloat16, mtp=False))


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Returns the milliseconds to the first token, the cached tokens, and the tokens."""
    request = engine.submit(prompt, max_new_tokens=_NEW_TOKENS, ignore_eos=True)
    done = request.result(_SECONDS)
    seconds = request.times.first_token - request.times.submitted
    return 1e3 * seconds, done.cached_tokens, done.tokens


def forget_files(directory: Path) -> None:
    """Makes the operating system drop the contents of files from its memory."""
    for path in directory.glob("??/*.page"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    engine: Engine, directory: Path, arguments: argparse.Namespace, vocab_size: int
) -> dict[str, Any]:
    """Returns the times to the first token by where the prefix comes from, round by round."""
    transfer = engine._transfer
    assert transfer is not None

    def nowhere() -> None:
        engine.clear_prefix_cache()

    def in_host_memory() -> None:
        engine.clear_prefix_cache(tiers=False)

    def in_files() -> None:
        engine.clear_prefix_cache(tiers=False)
        transfer.clear_memory()

    def on_disk() -> None:
        in_files()
        forget_files(directory)

    arms: dict[str, Callable[[], None]] = {
        "computed": nowhere,  # first: the others find what it stores
        "device": lambda: None,
        "host": in_host_memory,
        "files_in_memory": in_files,
        "files_on_disk": on_disk,
    }
    random = np.random.default_rng(0)
    prefix = random.integers(0, vocab_size, arguments.prefix).tolist()
    ms: dict[str, list[float]] = {name: [] for name in arms}
    cached: dict[str, int] = {}
    equal_rounds = 0
    for number in range(arguments.rounds + 1):
        suffix = random.integers(0, vocab_size, arguments.suffix).tolist()
        tokens: dict[str, list[int]] = {}
        for name, prepare in arms.items():
            prepare()
            taken, cached[name], tokens[name] = first_token(engine, [*prefix, *suffix])
            if name != "computed":
                assert tokens[name] == tokens["device"], f"{name}: other tokens"
            assert engine.flush_tiers(_SECONDS), "pages were not written"
            if number:
                ms[name].append(round(taken, 2))
        equal_rounds += bool(number) and tokens["computed"] == tokens["device"]
    return {
        "ttft_ms": {name: round(statistics.median(each), 2) for name, each in ms.items()},
        "cached_tokens": cached,
        "rounds_with_tokens_of_the_computed_prompt": equal_rounds,
        "rounds": ms,
    }


def time_tiers(
    model: DeepSeekV3, directory: Path, arguments: argparse.Namespace, *, pinned: bool
) -> dict[str, Any]:
    """Returns the figures of an engine with such host memory, and with files in ``directory``."""
    began = time.perf_counter()
    engine = Engine(
        model,
        None,
        arguments.prefix + arguments.suffix + _NEW_TOKENS,
        max_running=4,
        cache_tokens=4 * (arguments.prefix + arguments.suffix + 64),
        draft=arguments.draft,
        tiers=CacheTiers(
            host_bytes=4 * 2**30, disk=directory, load_seconds=_SECONDS, pinned=pinned
        ),
    )
    with engine:
        start_s = round(time.perf_counter() - began, 1)
        measured = measure(engine, directory, arguments, model.config.vocab_size)
        stats = engine.stats()
    return {
        "start_s": start_s,
        **measured,
        "page_bytes": stats.tiers[0].stored_bytes // stats.tiers[0].stored_pages,
        "tiers": stats.as_json()["tiers"],
    }


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        directory = Path(folder)
        result: dict[str, Any] = {
            **machine.description(),
            "command": "python -m scripts.bench_tiers " + " ".join(words),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "model": arguments.model,
            "prefix": arguments.prefix,
            "suffix": arguments.suffix,
            "damage": damage(directory, arguments),
        }
        print(json.dumps(result["damage"]), file=sys.stderr)
        model = load(arguments.model)
        jax.block_until_ready(jax.tree.leaves(model))
        result |= time_tiers(model, directory / "pages", arguments, pinned=False)
        if arguments.pinned:
            result["pinned"] = time_tiers(model, directory / "pinned", arguments, pinned=True)
    if arguments.out:
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
