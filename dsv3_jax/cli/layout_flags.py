"""The flags ``--layout``, ``--exchange``, ``--float8-dispatch`` and ``--distributed``."""

from __future__ import annotations

import argparse
import contextlib
import io

import jax

from dsv3_jax.distributed import initialize
from sharding import Layout, make_layout
from sharding.expert_parallel import check_platform


def make_layout_from(arguments: argparse.Namespace) -> Layout | None:
    """Returns the layout over all devices that was asked for; None without ``--layout``.

    With ``--distributed`` this process first joins the others of its run. JAX must not have been
    asked for its devices before.

    Raises:
      ValueError: ``--exchange`` or ``--distributed`` without ``--layout``; an exchange that this
        platform lacks; or as :func:`sharding.make_layout` and
        :func:`dsv3_jax.distributed.initialize`.
    """
    if arguments.layout is None:
        for name in ("exchange", "float8_dispatch", "distributed"):
            if getattr(arguments, name, None):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag}: expected --layout with it, got none")
        return None
    if getattr(arguments, "distributed", False):  # only some commands have it
        initialize()
    layout = make_layout(
        arguments.layout,
        exchange=arguments.exchange or "all_gather",
        float8_dispatch=arguments.float8_dispatch,
    )
    try:
        check_platform(layout.mesh, layout.exchange, layout.exchange_axes)
    except NotImplementedError as refusal:
        raise ValueError(f"--exchange {refusal}") from None
    return layout


def only_first_process_prints() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which stdout is discarded, except on the first process of a run.

    All processes have the same results.
    """
    if jax.process_index() == 0:
        return contextlib.nullcontext()
    return contextlib.redirect_stdout(io.StringIO())  # unlike None, it can be flushed
