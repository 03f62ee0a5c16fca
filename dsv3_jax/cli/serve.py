"""``dsv3 serve``: loads a model and serves it over HTTP.

This module checks what can be wrong with a call before JAX is imported.
:mod:`dsv3_jax.cli.run_server` does the rest."""

from __future__ import annotations

import argparse
import importlib.util
from numbers import Integral, Real

from dsv3_jax.cli.flags import check_ranges, check_weights, draft_of
from dsv3_jax.disaggregation.peers import Peers
from dsv3_jax.generation.settings import check_draft
from dsv3_jax.words import how_to_install

_PACKAGES = ("aiohttp", "fastapi", "llguidance", "prometheus_client", "uvicorn")


def run(arguments: argparse.Namespace) -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"expected the packages of the extra serve ({how_to_install('serve')}), which has"
            f" {', '.join(missing)}; found none"
        )
    check_arguments(arguments)
    check_prefill_urls(arguments)

    from dsv3_jax.cli.run_server import run_server

    run_server(arguments)


_RANGES = {
    "port": ("a port from 0 to 65535", Integral, 0, 65535),
    "max_len": ("an integer of at least 2", Integral, 2),
    "max_running": ("an integer of at least 1", Integral, 1),
    "max_body_mib": ("an integer of at least 1", Integral, 1),
    "max_waiting": ("an integer of at least 0", Integral, 0),
    "host_cache_gib": ("GiB from 0 to 1048576", Real, 0, 2**20),
    "disk_cache_gib": ("GiB from 0 to 1048576", Real, 0, 2**20),
    "prefix_load_gib": ("GiB from 0.001 to 1048576", Real, 1e-3, 2**20),
    "drain_seconds": ("seconds from 0 to 86400", Real, 0, 86400),
    "unread_seconds": ("seconds from 0.1 to 86400", Real, 0.1, 86400),
    "stuck_seconds": ("seconds from 0.1 to 86400", Real, 0.1, 86400),
    "request_seconds": ("seconds from 0.001 to 86400", Real, 1e-3, 86400),
    "target_ttft_ms": ("milliseconds from 0.1 to 3600000", Real, 0.1, 3.6e6),
    "target_tpot_ms": ("milliseconds from 0.1 to 3600000", Real, 0.1, 3.6e6),
}


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises ValueError for a setting that is out of range."""
    check_ranges(arguments, _RANGES)
    if arguments.host_cache_pinned and not arguments.host_cache_gib and arguments.role != "prefill":
        raise ValueError("--host-cache-pinned: expected --host-cache-gib with it")
    check_draft(**draft_of(arguments))
    check_weights(arguments)
    check_role(arguments)


_FLAGS_OF = {
    "both": (),
    "prefill": ("transfer", "transfer_port"),
    "decode": (
        "prefill_url",
        "prefill_api_key_file",
        "prefill_seconds",
        "prefill_min_tokens",
        "transfer",
    ),
}
_ROLE_RANGES = {
    "prefill_seconds": ("seconds from 0.001 to 3600", Real, 1e-3, 3600),
    "prefill_min_tokens": ("an integer of at least 1", Integral, 1),
    "transfer_port": ("a port from 0 to 65535", Integral, 0, 65535),
}


def check_role(arguments: argparse.Namespace) -> None:
    """Raises ValueError for flags that do not belong to the role, or are out of range.
    :func:`check_prefill_urls` is apart, because a decode server on Ray has no such flag."""
    role = arguments.role
    for name in sorted({name for names in _FLAGS_OF.values() for name in names}):
        if getattr(arguments, name) is not None and name not in _FLAGS_OF[role]:
            roles = " or ".join(each for each, names in _FLAGS_OF.items() if name in names)
            raise ValueError(f"--{name.replace('_', '-')}: expected --role {roles}, got {role}")
    if arguments.transfer_port is not None and arguments.transfer != "jax":
        raise ValueError("--transfer-port: expected --transfer jax with it")
    check_ranges(arguments, _ROLE_RANGES)


def check_prefill_urls(arguments: argparse.Namespace) -> None:
    """Raises ValueError for a decode server whose flags name no prefill server, or wrong ones."""
    if arguments.role == "decode":
        if not arguments.prefill_url:
            raise ValueError("--prefill-url: expected at least one with --role decode, got none")
        Peers(arguments.prefill_url)
