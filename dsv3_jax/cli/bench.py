"""``dsv3 bench``: measures a server.

This module checks what can be wrong with a call. :mod:`dsv3_jax.cli.run_bench` does the rest.
"""

from __future__ import annotations

import argparse
import importlib.util
from numbers import Integral, Real
from urllib.parse import urlsplit

from dsv3_jax.cli.flags import check_ranges
from dsv3_jax.words import how_to_install

_RANGES = {
    "rate": ("requests per second from 0.001, or inf", Real, 1e-3),
    "concurrency": ("1 to 10000 clients", Integral, 1, 10000),
    "num_requests": ("an integer of at least 1", Integral, 1),
    "input_len": ("an integer of at least 1", Integral, 1),
    "output_len": ("an integer of at least 1", Integral, 1),
    "scale": ("a factor from 0.001 to 100", Real, 1e-3, 100),
    "vocab_size": ("an integer of at least 21", Integral, 21),
    "seed": ("an integer of at least 0", Integral, 0),
}


def run(arguments: argparse.Namespace) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise ValueError(
            f"expected the packages of the extra serve ({how_to_install('serve')}), which has"
            " aiohttp; found none"
        )
    check_url(arguments.url)
    check_ranges(arguments, _RANGES)
    lengths = {"--input-len": arguments.input_len, "--output-len": arguments.output_len}
    given = [flag for flag, length in lengths.items() if length is not None]
    if len(given) == 1:
        raise ValueError(f"{', '.join(lengths)}: expected both or neither, got {given[0]}")
    if given and arguments.trace is not None:
        raise ValueError(f"--trace: expected no trace with --input-len, got {arguments.trace}")
    if arguments.details and not arguments.json:
        raise ValueError("--details: expected --json with it, which prints them; got none")
    if arguments.picture is not None:
        from dsv3_jax.viz.canvas import check_picture

        check_picture("--picture", arguments.picture)

    from dsv3_jax.cli.run_bench import run_bench

    run_bench(arguments)


def check_url(url: str) -> None:
    """Raises ValueError for what is not the address of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--url: expected an address such as http://127.0.0.1:8000, got {url!r}")
