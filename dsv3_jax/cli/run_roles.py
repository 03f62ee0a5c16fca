"""The parts of prefill and decode servers that the flags of ``dsv3 serve`` ask for."""

from __future__ import annotations

import argparse

from dsv3_jax.disaggregation.jax_transfer import JaxReceiver, JaxSender
from dsv3_jax.disaggregation.peers import Peers
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.disaggregation.transfer import HttpReceiver, HttpSender, Sender
from dsv3_jax.pages import CacheIdentity
from dsv3_jax.server.api_keys import read_keys


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


def remote_of(arguments: argparse.Namespace, identity: CacheIdentity) -> RemotePrefill | None:
    """Returns the source of pages on prefill servers; None if this is no decode server.

    Raises:
      ValueError: the file of the key has none.
    """
    if arguments.role != "decode":
        return None
    keys = arguments.prefill_api_key_file
    tokens = arguments.prefill_min_tokens or 64
    return RemotePrefill(
        identity,
        Peers(arguments.prefill_url),
        JaxReceiver() if arguments.transfer == "jax" else HttpReceiver(),
        seconds=prefill_seconds(arguments),
        min_pages=-(-tokens // identity.page_size),
        api_key=None if keys is None else read_keys(keys)[0],
    )


def prefill_seconds(arguments: argparse.Namespace) -> float:
    """Returns the longest time for the pages of a prompt to arrive."""
    return 30.0 if arguments.prefill_seconds is None else arguments.prefill_seconds
