"""The model and the layout that a command's flags ask for."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import jax

from dsv3_jax.checkpoint.find import find_config_directory
from dsv3_jax.checkpoint.load import load
from dsv3_jax.cli.progress import StatusLine
from dsv3_jax.distributed import initialize
from dsv3_jax.engine.scheduling.step_sizes import LatencyTargets
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer
from sharding import Layout, make_layout
from sharding.expert_parallel import check_platform


def make_layout_from(arguments: argparse.Namespace) -> Layout | None:
    """Returns the layout over all devices that was asked for; None without ``--layout``. With
    ``--distributed`` this process first joins the others of its run, so JAX must not have been
    asked for its devices before."""
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


def load_model(
    arguments: argparse.Namespace, name: str, layout: Layout | None
) -> tuple[DeepSeekV3, Tokenizer | None]:
    """Loads a model in the dtypes that the flags ask for, and shows a line meanwhile."""
    with StatusLine(f"loading {name}"):
        return load(
            name,
            dtype=arguments.dtype,
            quantization=arguments.quantization,
            cache_dtype=arguments.cache_dtype,
            activations=arguments.activations,
            layout=layout,
        )


def directory_of(model: str) -> Path:
    """Returns the directory of a model's config. Raises ValueError if there is no such model, or it
    has no tokenizer."""
    directory = find_config_directory(model)
    if not (directory / "tokenizer.json").is_file():
        raise ValueError(f"{model}: expected a tokenizer.json, found none")
    return directory


def only_first_process_prints() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which stdout is discarded, except on the first process of a run: all
    have the same results."""
    if jax.process_index() == 0:
        return contextlib.nullcontext()
    return contextlib.redirect_stdout(io.StringIO())  # unlike None, it can be flushed


@contextlib.contextmanager
def refused_if_too_large(expected: str) -> Iterator[None]:
    """Turns a device's lack of memory into a ValueError of one line, which begins with
    ``expected``: the model, and the flags that change its size."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(f"{expected}, got: {reason:.300}") from None


def latency_targets(arguments: argparse.Namespace) -> LatencyTargets | None:
    """Returns the targets in seconds, or None if neither flag is given."""
    milliseconds = arguments.target_ttft_ms, arguments.target_tpot_ms
    if milliseconds == (None, None):
        return None
    return LatencyTargets(*(None if ms is None else 1e-3 * ms for ms in milliseconds))
