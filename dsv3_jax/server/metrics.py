"""/metrics: figures of the engine and of requests, under the names of vLLM.

Routers and dashboards for vLLM read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import prometheus_client
from fastapi import APIRouter, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from dsv3_jax.engine import Engine, EngineRequest, EngineStats
from dsv3_jax.generation.completion import Completion
from dsv3_jax.pages import TierStats
from dsv3_jax.server.frontend.remote_engine import RemoteEngine

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    30,
    120,
)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 1, 2.5)


Reason = Literal["stop", "length", "abort", "error"]
_REASONS: tuple[Reason, ...] = get_args(Reason)


class Metrics:
    """Figures of one server.

    Args:
      model_name: value of the label ``model_name``, which all figures have.
      page_size: tokens of a cache page.
    """

    def __init__(self, engine: Engine | RemoteEngine, model_name: str, page_size: int):
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineFigures(engine, model_name, page_size))
        self._model_name = model_name
        self._success = prometheus_client.Counter(
            "vllm:request_success",
            "Completions that came to their end, by reason: stop, length, abort (the client went"
            " away, the time limit, the end of the server) or error.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        for reason in _REASONS:  # so that all are there from the beginning, with 0
            self._success.labels(model_name, reason)
        self._time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time from the arrival of a completion to its first token.",
            _SECONDS,
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from the arrival of a completion to its end.",
            _SECONDS,
        )
        self._time_per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a completion.",
            _TOKEN_SECONDS,
        )

    def _histogram(
        self, name: str, description: str, buckets: Sequence[float]
    ) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            name, description, ("model_name",), registry=self._registry, buckets=buckets
        ).labels(self._model_name)

    def count(self, reason: Reason) -> None:
        """Adds a completion without its times: that of one that ended early says nothing."""
        self._success.labels(self._model_name, reason).inc()

    def observe(self, handle: EngineRequest, completion: Completion) -> None:
        """Adds a completion that came to its end."""
        reason, tokens = completion.finish_reason, len(completion.tokens)
        if reason not in ("stop", "length"):
            self.count("abort")
            return
        self.count(reason)
        times = handle.times
        self._latency.observe(times.end - times.submitted)
        if math.isfinite(times.first_token):
            self._time_to_first_token.observe(times.first_token - times.submitted)
            if tokens > 1:
                self._time_per_token.observe((times.end - times.first_token) / (tokens - 1))

    def add(self, figures: Collector) -> None:
        """Adds figures of another part of the server."""
        self._registry.register(figures)

    def text(self) -> bytes:
        """Returns all figures in Prometheus' text format. It may wait for the engine's lock."""
        return prometheus_client.generate_latest(self._registry)


class _EngineFigures(Collector):
    """Reads the engine's figures whenever they are asked for."""

    def __init__(self, engine: Engine | RemoteEngine, model_name: str, page_size: int):
        self._engine = engine
        self._model_name = model_name
        self._page_size = page_size

    def collect(self) -> Iterator[Metric]:
        """Yields the figures."""
        stats = self._engine.stats()
        gauges = {
            "num_requests_running": ("Completions that have a slot.", stats.running),
            "num_requests_waiting": ("Completions in the waiting queue.", stats.waiting),
            "kv_cache_usage_perc": ("Share of the cache in use, from 0 to 1.", stats.cache_usage),
        }
        counters = {
            "prefix_cache_queries": (
                "Prompt tokens that the prefix cache was asked for.",
                stats.prefix_queried_tokens,
            ),
            "prefix_cache_hits": (
                "Prompt tokens that the prefix cache saved.",
                stats.prefix_hit_tokens,
            ),
            "num_preemptions": ("Completions that lost their pages.", stats.preemptions),
            "prompt_tokens": ("Prompt tokens that were prefilled.", stats.prompt_tokens),
            "generation_tokens": ("Tokens that were generated.", stats.output_tokens),
            "spec_decode_num_draft_tokens": (
                "Drafts that the model verified.",
                stats.drafted_tokens,
            ),
            "spec_decode_num_accepted_tokens": (
                "Drafts that became tokens.",
                stats.accepted_tokens,
            ),
        }
        if stats.loading_bytes is not None:
            loading = GaugeMetricFamily(
                "dsv3:prefix_load_bytes",
                "Host memory of pages that are loaded for waiting completions.",
                labels=["model_name"],
            )
            loading.add_metric([self._model_name], stats.loading_bytes)
            yield loading
        if stats.tiers:
            counters["external_prefix_cache_hits"] = (
                "Prompt tokens that were loaded from the tiers, among prefix_cache_hits.",
                stats.loaded_tokens,
            )
            yield from self._tiers(stats.tiers, stats.reloaded_tokens)
        for name, (description, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", description, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, (description, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", description, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        pages = stats.cache_tokens // self._page_size
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Size of the cache, in its labels.",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        info.add_metric([self._model_name, str(self._page_size), str(pages)], 1)
        yield info
        yield from self._compilations(stats)

    def _compilations(self, stats: EngineStats) -> Iterator[Metric]:
        """Yields the figures of programs that were compiled while requests waited. vLLM has none of
        these."""
        labels = ["model_name"]
        counters = {
            "compiled_programs": (
                "Programs that were compiled while completions waited for them.",
                stats.compiled_after_warm_up,
            ),
            "compile_seconds": (
                "Seconds in which completions waited for programs to be compiled.",
                stats.compile_seconds,
            ),
        }
        for name, (description, value) in counters.items():
            counter = CounterMetricFamily(f"dsv3:{name}", description, labels=labels)
            counter.add_metric([self._model_name], value)
            yield counter
        gauge = GaugeMetricFamily(
            "dsv3:compiling_seconds",
            "Seconds since the compilation began that completions wait for; 0 if there is none.",
            labels=labels,
        )
        gauge.add_metric([self._model_name], stats.compiling_seconds)
        yield gauge

    def _tiers(self, tiers: Sequence[TierStats], reloaded_tokens: int) -> Iterator[Metric]:
        """Yields the figures of the tiers. vLLM has none of these."""
        reloaded = CounterMetricFamily(
            "dsv3:reloaded_tokens",
            "Tokens of preempted completions that were loaded from the tiers.",
            labels=["model_name"],
        )
        reloaded.add_metric([self._model_name], reloaded_tokens)
        yield reloaded
        counters = {
            "hit_pages": "Pages that were loaded from the tier.",
            "hit_bytes": "Bytes of these pages.",
            "stored_pages": "Pages that the tier did not have before.",
            "stored_bytes": "Bytes of these pages.",
            "dropped_pages": "Pages that the tier could not take.",
            "damaged_pages": "Pages that were refused and deleted.",
        }
        labels = ["model_name", "tier"]
        for name, description in counters.items():
            counter = CounterMetricFamily(f"dsv3:tier_{name}", description, labels=labels)
            for tier in tiers:
                counter.add_metric([self._model_name, tier.name], getattr(tier, name))
            yield counter
        used = GaugeMetricFamily("dsv3:tier_used_bytes", "Size of the tier now.", labels=labels)
        for tier in tiers:
            used.add_metric([self._model_name, tier.name], tier.used_bytes)
        yield used


router = APIRouter()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Returns all figures in Prometheus' text format."""
    service = request.app.state.service
    text = await service.in_thread(service.metrics.text, "calls")
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)
