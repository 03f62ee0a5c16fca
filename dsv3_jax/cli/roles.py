"""Checks the flag ``--role`` of ``dsv3 serve`` and those that belong to it.

:mod:`dsv3_jax.cli.run_roles` makes what they ask for.
"""

from __future__ import annotations

import argparse
from numbers import Integral, Real

from dsv3_jax.disaggregation.peers import Peers
from dsv3_jax.generation.settings import check

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


def check_role(arguments: argparse.Namespace) -> None:
    """Raises ValueError for flags that do not belong to the role, or are out of range.

    :func:`check_prefill_urls` is apart, because a decode server on Ray has no such flag.
    """
    role = arguments.role
    for name in sorted({name for names in _FLAGS_OF.values() for name in names}):
        if getattr(arguments, name) is not None and name not in _FLAGS_OF[role]:
            roles = " or ".join(each for each, names in _FLAGS_OF.items() if name in names)
            raise ValueError(f"--{name.replace('_', '-')}: expected --role {roles}, got {role}")
    if (seconds := arguments.prefill_seconds) is not None:
        check("--prefill-seconds", seconds, "seconds from 0.001 to 3600", Real, 1e-3, 3600)
    if (tokens := arguments.prefill_min_tokens) is not None:
        check("--prefill-min-tokens", tokens, "an integer of at least 1", Integral, 1)
    if (port := arguments.transfer_port) is not None:
        if arguments.transfer != "jax":
            raise ValueError("--transfer-port: expected --transfer jax with it")
        check("--transfer-port", port, "a port from 0 to 65535", Integral, 0, 65535)


def check_prefill_urls(arguments: argparse.Namespace) -> None:
    """Raises ValueError for a decode server whose flags name no prefill server, or wrong ones."""
    if arguments.role == "decode":
        if not arguments.prefill_url:
            raise ValueError("--prefill-url: expected at least one with --role decode, got none")
        Peers(arguments.prefill_url)
