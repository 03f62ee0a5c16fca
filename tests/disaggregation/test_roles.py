"""The parts of a server that the flags of a role ask for."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from dsv3_jax.cli.arguments.servers import add_serve
from dsv3_jax.cli.run_server import tiers_of
from dsv3_jax.cli.serve import check_arguments, check_prefill_urls, check_role


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_serve(parser)
    return parser.parse_args(words)


def test_a_decode_server_needs_no_tier_but_its_source():
    arguments = parsed("--role", "decode", "--prefill-url", "http://a:1", "--prefill-seconds", "9")
    check_role(arguments)
    check_prefill_urls(arguments)
    remote = SimpleNamespace(name="remote")
    tiers = tiers_of(arguments, remote)
    assert (tiers.sources, tiers.host_bytes, tiers.load_seconds) == ((remote,), 0, 10)


def test_a_prefill_server_has_host_memory():
    tiers = tiers_of(parsed("--role", "prefill"), None)
    assert (tiers.sources, tiers.host_bytes) == ((), 4 * 2**30)
    assert tiers_of(parsed(), None) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), 4 * 2**30),
        (("--host-cache-gib", "40"), 10 * 2**30),
        (("--host-cache-gib", "40", "--prefix-load-gib", "0.5"), 2**29),
    ],
)
def test_the_memory_for_loads(words, expected):
    arguments = parsed("--disk-cache", "pages", *words)
    check_arguments(arguments)
    assert tiers_of(arguments, None).most_load_bytes == expected


def test_no_memory_for_loads_is_refused():
    with pytest.raises(ValueError, match=r"--prefix-load-gib: expected GiB from 0\.001 to 1048576"):
        check_arguments(parsed("--prefix-load-gib", "0"))


@pytest.mark.parametrize(
    ("urls", "message"),
    [([], "--prefill-url: expected at least one"), (["a:1"], "expected http://HOST:PORT")],
)
def test_a_decode_server_needs_prefill_servers(urls, message):
    words = [word for url in urls for word in ("--prefill-url", url)]
    with pytest.raises(ValueError, match=message):
        check_prefill_urls(parsed("--role", "decode", *words))
