"""The part of ``dsv3 serve`` that needs JAX: loads the model and runs the server."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import time
from typing import NamedTuple

import jax

from dsv3_jax import chat_formats, compile_cache
from dsv3_jax.cli import loading
from dsv3_jax.cli.flags import draft_of, max_len_of, naming
from dsv3_jax.cli.output import log
from dsv3_jax.config import ModelConfig
from dsv3_jax.disaggregation.jax_transfer import JaxReceiver, JaxSender
from dsv3_jax.disaggregation.peers import Peers
from dsv3_jax.disaggregation.protocol import HttpReceiver, HttpSender, Sender
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.engine import Engine, Follower, Leader
from dsv3_jax.files import write_failure
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.pages import CacheTiers, PageFormat
from dsv3_jax.server.access_log import log_to_stderr
from dsv3_jax.server.frontend.process import run_with_http_process
from dsv3_jax.server.middleware import ApiKeys, read_keys
from dsv3_jax.server.run import bind, run
from dsv3_jax.server.service import ServerSettings
from dsv3_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def run_server(arguments: argparse.Namespace) -> None:
    with (
        log_to_stderr(arguments.log_level),
        bind(arguments.host, arguments.port) as bound,
        contextlib.ExitStack() as stack,
    ):
        sender = sender_of(arguments)
        engine, tokenizer, settings, remote = make_engine(arguments)
        if remote is not None:
            stack.callback(remote.close)  # after the engine
        with engine:
            if arguments.one_process or arguments.role != "both":
                run(engine, tokenizer, settings, bound, sender=sender, remote=remote)
            else:
                run_with_http_process(engine, tokenizer, settings, bound)


class MadeEngine(NamedTuple):
    """An engine and what its server needs."""

    engine: Engine
    tokenizer: Tokenizer
    settings: ServerSettings
    remote: RemotePrefill | None  # the source of pages of a server with the role ``decode``


def make_engine(
    arguments: argparse.Namespace, *, process: Leader | Follower | None = None
) -> MadeEngine:
    """Loads the model, and returns its engine. ``process`` is this one's part on a mesh of several
    processes, see :class:`Engine`."""
    template = None
    if arguments.chat_template is not None:
        with naming("--chat-template"):
            template = chat_formats.read(arguments.chat_template)
    prefill_key = prefill_key_of(arguments)
    with naming("--api-key-file"):
        keys = None if arguments.api_key_file is None else ApiKeys.read(arguments.api_key_file)
    for flag in ("--disk-cache", "--program-store"):
        directory = getattr(arguments, flag[2:].replace("-", "_"))
        if directory is not None and (reason := write_failure(directory)):
            raise ValueError(
                f"{flag}: expected a directory that can be written, got {directory} ({reason})"
            )
    max_len = max_len_of(arguments, ModelConfig.from_hf(loading.directory_of(arguments.model)))
    model, tokenizer = _load(arguments)
    if template is not None:
        tokenizer = tokenizer.with_chat_template(template)
    max_requests = arguments.max_running + arguments.max_waiting
    remote = remote_of(arguments, model, prefill_key)
    with loading.refused_if_too_large(_expected(arguments.model)):
        engine = Engine(
            model,
            tokenizer,
            max_len,
            max_running=arguments.max_running,
            max_waiting=max_requests,  # the server itself counts
            cache_tokens=arguments.cache_tokens,
            tiers=tiers_of(arguments, remote),
            targets=loading.latency_targets(arguments),
            process=process,
            **draft_of(arguments),
        )
    settings = ServerSettings(
        model_name=arguments.served_name or arguments.model,
        max_len=max_len,
        max_requests=max_requests,
        max_body_bytes=arguments.max_body_mib * 2**20,
        request_seconds=arguments.request_seconds,
        unread_seconds=arguments.unread_seconds,
        drain_seconds=arguments.drain_seconds,
        stuck_seconds=arguments.stuck_seconds,
        api_keys=keys,
        program_store=arguments.program_store,
        log_level=arguments.log_level,
    )
    return MadeEngine(engine, tokenizer, settings, remote)


def _load(arguments: argparse.Namespace) -> tuple[DeepSeekV3, Tokenizer]:
    layout = loading.make_layout_from(arguments)
    if arguments.program_store is not None and jax.default_backend() == "cpu":
        # Programs from JAX's cache cannot be stored again, see ProgramStore.save.
        jax.config.update("jax_enable_compilation_cache", False)
        if arguments.compile_cache is not None:
            log("on CPUs --program-store keeps the programs, and --compile-cache is not used")
    else:
        compile_cache.enable(arguments.compile_cache)
    began = time.perf_counter()
    logger.info("loading %s", arguments.model)
    with loading.refused_if_too_large(_expected(arguments.model)):
        model, tokenizer = loading.load_model(arguments, arguments.model, layout)
    logger.info("loaded %s in %.1f s", arguments.model, time.perf_counter() - began)
    assert tokenizer is not None
    return model, tokenizer


def _expected(model: str) -> str:
    return (
        f"{model}: expected a model and a cache that fit on the devices (--cache-tokens,"
        " --quantization and --layout change their size; dsv3 plan reports what fits)"
    )


_PREFILL_HOST_BYTES = 4 * 2**30
"""Size of the tier in host memory from which a prefill server sends pages."""


def sender_of(arguments: argparse.Namespace) -> Sender | None:
    """Returns what gives pages to decode servers; None if this is no prefill server. ``--transfer
    jax`` needs a ``--host`` of one interface."""
    if arguments.role != "prefill":
        return None
    if arguments.transfer != "jax":
        return HttpSender()
    return JaxSender(arguments.host, arguments.transfer_port or 0)


def prefill_key_of(arguments: argparse.Namespace) -> str | None:
    """Returns the key that prefill servers expect, or None."""
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
