"""The parts of prefill and decode servers that the flags of ``dsv3 serve`` ask for."""

from __future__ import annotations

import argparse
import dataclasses

from dsv3_jax.cli.flags import naming
from dsv3_jax.disaggregation.jax_transfer import JaxReceiver, JaxSender
from dsv3_jax.disaggregation.peers import Peers
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.disaggregation.transfer import HttpReceiver, HttpSender, Sender
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.pages import CacheTiers, PageFormat
from dsv3_jax.server.api_keys import read_keys

_PREFILL_HOST_BYTES = 4 * 2**30
"""Size of the tier in host memory from which a prefill server sends pages."""


def sender_of(arguments: argparse.Namespace) -> Sender | None:
    """Returns what gives pages to decode servers; None if this is no prefill server.

    Raises:
      ValueError: ``--host`` is not the address of one interface, which ``--transfer jax`` needs.
    """
    if arguments.role != "prefill":
        return None
    if arguments.transfer != "jax":
        return HttpSender()
    return JaxSender(arguments.host, arguments.transfer_port or 0)


def prefill_key_of(arguments: argparse.Namespace) -> str | None:
    """Returns the key that prefill servers expect, or None.

    Raises:
      ValueError: the file of the key has none, or cannot be read.
    """
    if arguments.prefill_api_key_file is None:
        return None
    with naming("--prefill-api-key-file"):
        return read_keys(arguments.prefill_api_key_file)[0]


def remote_of(
    arguments: argparse.Namespace, model: DeepSeekV3, api_key: str | None
) -> RemotePrefill | None:
    """Returns the source of pages on prefill servers; None if this is no decode server."""
    if arguments.role != "decode":
        return None
    tokens = arguments.prefill_min_tokens or DEFAULT_PAGE_SIZE
    has_mtp = model.config.num_nextn_predict_layers > 0
    format = PageFormat.of(model.cache_spec(mtp=has_mtp), DEFAULT_PAGE_SIZE)
    return RemotePrefill(
        Peers(arguments.prefill_url or ()),
        JaxReceiver() if arguments.transfer == "jax" else HttpReceiver(),
        page_size=format.page_size,
        max_page_bytes=format.num_bytes,
        seconds=_prefill_seconds(arguments),
        min_pages=-(-tokens // format.page_size),
        api_key=api_key,
    )


def tiers_of(arguments: argparse.Namespace, remote: RemotePrefill | None) -> CacheTiers | None:
    """Returns the tiers of the cache that the flags ask for and the role needs, or None."""
    host_bytes = int(arguments.host_cache_gib * 2**30)
    if arguments.role == "prefill":
        host_bytes = host_bytes or _PREFILL_HOST_BYTES
    if not (host_bytes or arguments.disk_cache or remote):
        return None
    load_gib = arguments.prefix_load_gib
    tiers = CacheTiers(
        host_bytes,
        arguments.disk_cache,
        int(arguments.disk_cache_gib * 2**30),
        sources=() if remote is None else (remote,),
        load_bytes=None if load_gib is None else int(load_gib * 2**30),
        pinned=arguments.host_cache_pinned,
    )
    if remote is None:
        return tiers
    # The source itself ends at its time, and then has the pages that came so far.
    seconds = max(_prefill_seconds(arguments) + 1, tiers.load_seconds)
    return dataclasses.replace(tiers, load_seconds=seconds)


def _prefill_seconds(arguments: argparse.Namespace) -> float:
    return 30.0 if arguments.prefill_seconds is None else arguments.prefill_seconds
