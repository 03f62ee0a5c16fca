"""Latency targets of the flags ``--target-ttft-ms`` and ``--target-tpot-ms``."""

from __future__ import annotations

import argparse

from dsv3_jax.engine.scheduling.sla_controller import LatencyTargets


def latency_targets(arguments: argparse.Namespace) -> LatencyTargets | None:
    """Returns the targets in seconds, or None if neither flag is given.

    Raises:
      ValueError: a target is not above 0.
    """
    milliseconds = arguments.target_ttft_ms, arguments.target_tpot_ms
    if milliseconds == (None, None):
        return None
    return LatencyTargets(*(None if ms is None else 1e-3 * ms for ms in milliseconds))
