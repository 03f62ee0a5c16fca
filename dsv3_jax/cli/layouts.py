"""``--layout``: a model over all devices, those of other processes too."""

from __future__ import annotations

import argparse
import contextlib
import io

import jax

from dsv3_jax.distributed import initialize
from sharding import Layout, make_layout


def layout_of(arguments: argparse.Namespace) -> Layout | None:
    """The layout that was asked for, after this process has joined the others of its run. Comes
    before anything that asks for devices.

    Raises:
      ValueError: an exchange, or several processes, without a layout; or as :func:`make_layout` and
        :func:`initialize`.
    """
    if arguments.layout is None:
        for flag in ("exchange", "distributed"):
            if getattr(arguments, flag):
                raise ValueError(f"--{flag}: expected a --layout beside it, got none")
        return None
    if arguments.distributed:
        initialize()
    return make_layout(arguments.layout, exchange=arguments.exchange or "all_gather")


def one_speaks() -> contextlib.AbstractContextManager[object]:
    """Of several processes with the same results the first prints them."""
    if jax.process_index() == 0:
        return contextlib.nullcontext()
    return contextlib.redirect_stdout(io.StringIO())  # a stream that can be flushed, unlike None
