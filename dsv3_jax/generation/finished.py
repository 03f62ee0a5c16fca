"""Reasons for which a sequence on the device takes no further step."""

from __future__ import annotations

RUNNING, STOPPED, FULL, NON_FINITE = range(4)
"""RUNNING: it takes further steps. STOPPED: a stop token ended it. FULL: it has reached its limit.
NON_FINITE: the logits after its last token contain NaN or an infinity."""
