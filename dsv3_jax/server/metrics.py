"""/metrics: figures of the engine and of requests, under the names of vLLM, which routers and
dashboards read. Those that vLLM does not have begin with ``dsv3:``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import prometheus_client
from fastapi import APIRouter, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.engine import Engine, EngineRequest
from dsv3_jax.generation.completion import Completion
from dsv3_jax.pages import TierStats
from dsv3_jax.server.frontend.remote_engine import RemoteEngine

_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 120),
)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 1, 2.5)


Reason = Literal["stop", "length", "abort", "error"]
_REASONS: tuple[Reason, ...] = get_args(Reason)


class Metrics:
    """Figures of one server."""

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
        self._registry.register(figures)

    def text(self) -> bytes:
        """Returns all figures in Prometheus' text format. It may wait for the engine's lock."""
        return prometheus_client.generate_latest(self._registry)


class Figures(Collector):
    """Figures of a part of the server, which are read whenever they are asked for."""

    def __init__(self, model_name: str):
        self._model_name = model_name

    def gauge(self, name: str, description: str, value: float) -> Metric:
        """Returns a number as it is now."""
        return self.labelled(GaugeMetricFamily, name, description, (), {(): value})

    def counter(self, name: str, description: str, value: float) -> Metric:
        """Returns a total."""
        return self.labelled(CounterMetricFamily, name, description, (), {(): value})

    def labelled(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        description: str,
        labels: Sequence[str],
        values: Mapping[tuple[str, ...], float],
    ) -> Metric:
        """Returns numbers by the values of further labels."""
        metric = kind(name, description, labels=["model_name", *labels])
        for label_values, value in values.items():
            metric.add_metric([self._model_name, *label_values], value)
        return metric


class _EngineFigures(Figures):
    def __init__(self, engine: Engine | RemoteEngine, model_name: str, page_size: int):
        super().__init__(model_name)
        self._engine = engine
        self._page_size = page_size

    def collect(self) -> Iterator[Metric]:
        stats, gauge, counter = self._engine.stats(), self.gauge, self.counter
        if stats.loading_bytes is not None:
            yield gauge(
                "dsv3:prefix_load_bytes",
                "Host memory of pages that are loaded for waiting completions.",
                stats.loading_bytes,
            )
        if stats.tiers:
            yield from self._tiers(stats.tiers, stats.reloaded_tokens)
        for name, description, value in (
            ("num_requests_running", "Completions that have a slot.", stats.running),
            ("num_requests_waiting", "Completions in the waiting queue.", stats.waiting),
            ("kv_cache_usage_perc", "Share of the cache in use, from 0 to 1.", stats.cache_usage),
        ):
            yield gauge(f"vllm:{name}", description, value)
        hits, queries = stats.prefix_hit_tokens, stats.prefix_queried_tokens
        drafted, accepted = stats.drafted_tokens, stats.accepted_tokens
        for name, description, value in (
            ("prefix_cache_queries", "Prompt tokens that the prefix cache was asked for.", queries),
            ("prefix_cache_hits", "Prompt tokens that the prefix cache saved.", hits),
            ("num_preemptions", "Completions that lost their pages.", stats.preemptions),
            ("prompt_tokens", "Prompt tokens that were prefilled.", stats.prompt_tokens),
            ("generation_tokens", "Tokens that were generated.", stats.output_tokens),
            ("spec_decode_num_draft_tokens", "Drafts that the model verified.", drafted),
            ("spec_decode_num_accepted_tokens", "Drafts that became tokens.", accepted),
        ):
            yield counter(f"vllm:{name}", description, value)
        if stats.tiers:
            yield counter(
                "vllm:external_prefix_cache_hits",
                "Prompt tokens that were loaded from the tiers, among prefix_cache_hits.",
                stats.loaded_tokens,
            )
        yield self.labelled(
            GaugeMetricFamily,
            "vllm:cache_config_info",
            "Size of the cache, in its labels.",
            ("block_size", "num_gpu_blocks"),
            {(str(self._page_size), str(stats.cache_tokens // self._page_size)): 1},
        )
        yield counter(
            "dsv3:compiled_programs",
            "Programs that were compiled while completions waited for them.",
            stats.compiled_after_warm_up,
        )
        yield counter(
            "dsv3:compile_seconds",
            "Seconds in which completions waited for programs to be compiled.",
            stats.compile_seconds,
        )
        yield gauge(
            "dsv3:compiling_seconds",
            "Seconds since the compilation began that completions wait for; 0 if there is none.",
            stats.compiling_seconds,
        )

    def _tiers(self, tiers: Sequence[TierStats], reloaded_tokens: int) -> Iterator[Metric]:
        yield self.counter(
            "dsv3:reloaded_tokens",
            "Tokens of preempted completions that were loaded from the tiers.",
            reloaded_tokens,
        )
        counter = CounterMetricFamily
        for kind, name, description in (
            (counter, "hit_pages", "Pages that were loaded from the tier."),
            (counter, "hit_bytes", "Bytes of these pages."),
            (counter, "stored_pages", "Pages that the tier did not have before."),
            (counter, "stored_bytes", "Bytes of these pages."),
            (counter, "dropped_pages", "Pages that the tier could not take."),
            (counter, "damaged_pages", "Pages that were refused and deleted."),
            (GaugeMetricFamily, "used_bytes", "Size of the tier now."),
        ):
            values = {(tier.name,): getattr(tier, name) for tier in tiers}
            yield self.labelled(kind, f"dsv3:tier_{name}", description, ("tier",), values)


class DecodeFigures(Figures):
    """Figures of a decode server: what it pulled, what failed and why."""

    def __init__(self, remote: RemotePrefill, model_name: str):
        super().__init__(model_name)
        self._remote = remote

    def collect(self) -> Iterator[Metric]:
        figures = self._remote.figures
        open_requests, counter = figures.open_requests, self.counter
        yield self.gauge(
            "dsv3:remote_prefills_open", "Prompts whose pages are under way.", open_requests
        )
        requests, pages = figures.requests, figures.pages
        yield counter("dsv3:remote_prefills", "Prompts for which peers were asked.", requests)
        yield counter("dsv3:remote_prefill_pages", "Pages that were pulled.", pages)
        yield counter("dsv3:remote_prefill_bytes", "Bytes of pulled pages.", figures.num_bytes)
        yield counter("dsv3:remote_prefill_seconds", "Time of these requests.", figures.seconds)
        recomputed = "Pages that no peer gave. The server computed them itself."
        for name, description, counts in (
            ("failures", "Failed requests to one peer.", figures.failures),
            ("recomputed_pages", recomputed, figures.recomputed_pages),
        ):
            yield self.labelled(
                CounterMetricFamily,
                f"dsv3:remote_prefill_{name}",
                description,
                ("reason",),
                {(reason,): count for reason, count in counts.items()},
            )
        yield self.labelled(
            GaugeMetricFamily,
            "dsv3:prefill_peer_up",
            "Whether the last request to a prefill server succeeded.",
            ("peer",),
            {(url,): int(is_up) for url, is_up in self._remote.peers.up.items()},
        )


router = APIRouter()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Returns all figures in Prometheus' text format."""
    service = request.app.state.service
    text = await service.in_thread(service.metrics.text, "calls")
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)
