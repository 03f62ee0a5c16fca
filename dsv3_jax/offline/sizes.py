"""The sizes of a Generator's two programs, which prefill and decode."""

from __future__ import annotations

import dataclasses

from dsv3_jax.engine.device.buckets import Buckets

MAX_STEPS = 256
"""Most decode steps in a dispatch. Results of a dispatch have room for as many."""

REFILL_STEPS = 8
"""While prompts wait: decode steps during which the slot of a finished request may stay empty. Each
dispatch takes the host a few milliseconds, and a step with few prompts is mostly padding."""


def generator_buckets(default: Buckets, local_batch: int, *, multiple: int = 1) -> Buckets:
    """Returns the sizes for ``local_batch`` requests on each shard: one program that prefills and
    one that decodes, so that a request's tokens do not depend on other requests.

    A prefill takes about 512 tokens per request of a batch of up to four, and no more in larger
    batches. Where chunks have no more than 32 tokens, it takes a chunk per request of a batch of up
    to eight: these are the chunks of CPUs, on which padding costs more.

    Args:
      default: sizes of an engine on these devices.
      multiple: number of micro-batches.
    """
    tokens = default.chunk_tokens
    chunks = min(local_batch, 8) if tokens <= 32 else min(local_batch, 4) * -(-512 // tokens)
    return _separate(default, local_batch, -(-chunks // multiple) * multiple)


def chunked_buckets(default: Buckets, local_batch: int, prefill_chunk: int) -> Buckets:
    """Returns sizes for prefills of up to ``prefill_chunk`` tokens of every request at once, in
    expanded form."""
    chunked = dataclasses.replace(default, chunk_tokens=prefill_chunk, chunk_form="expanded")
    return _separate(chunked, local_batch, local_batch)


def _separate(default: Buckets, local_batch: int, chunks: int) -> Buckets:
    return dataclasses.replace(
        default,
        decodes=(local_batch,),
        chunks=(chunks,),
        max_steps=MAX_STEPS,
        multi_step_decodes=None,
        separate=True,
    )
