"""Throughput and latencies, with the field names and definitions of ``vllm bench serve``.

TTFT is the time from sending a request to its first chunk of text, ITL the time between two chunks,
E2EL the time to the last chunk, and TPOT the time after the first chunk per later token. A chunk
has several tokens if drafts were accepted, so ITL and TPOT then differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv3_jax.client.completions import RequestRecord

_PERCENTILES = (50, 90, 99)


def results(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Returns the figures of all requests. Latencies are those of the requests that succeeded."""
    ended = [record for record in records if not record.error]
    last = max((r.start + r.chunks[-1] for r in records if r.chunks), default=math.nan)
    duration = last - min((record.start for record in records), default=math.nan)
    inputs = sum(record.prompt_tokens for record in ended)
    outputs = sum(record.output_tokens for record in ended)
    return {
        "duration": duration,
        "completed": len(ended),
        "failed": len(records) - len(ended),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(ended) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_concurrent_requests": _most_at_a_time(records),
        **_latencies(ended),
    }


def details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.start for record in records],
        "ttfts": [record.chunks[0] if record.chunks else 0.0 for record in records],
        "itls": [np.diff(record.chunks).tolist() for record in records],
        "errors": [record.error for record in records],
    }


def _latencies(ended: Sequence[RequestRecord]) -> dict[str, float]:
    """Returns statistics of each kind of latency in milliseconds."""
    seconds = {
        "ttft": [record.chunks[0] for record in ended],
        "tpot": [
            (record.chunks[-1] - record.chunks[0]) / (record.output_tokens - 1)
            for record in ended
            if record.output_tokens > 1
        ],
        "itl": [gap for record in ended for gap in np.diff(record.chunks).tolist()],
        "e2el": [record.chunks[-1] for record in ended],
    }
    figures: dict[str, float] = {}
    for name, values in seconds.items():
        ms = 1e3 * np.asarray(values or [0.0])
        figures[f"mean_{name}_ms"] = float(ms.mean())
        figures[f"median_{name}_ms"] = float(np.median(ms))
        figures[f"std_{name}_ms"] = float(ms.std())
        for p in _PERCENTILES:
            figures[f"p{p}_{name}_ms"] = float(np.percentile(ms, p))
    return figures


def _most_at_a_time(records: Sequence[RequestRecord]) -> int:
    """Returns the largest number of requests that were open at one time."""
    events = [(record.start, 1) for record in records]
    events += [(r.start + (r.chunks[-1] if r.chunks else 0.0), -1) for r in records]
    return int(max(np.cumsum([change for _, change in sorted(events)]), default=0))
