"""Figures of the roles ``prefill`` and ``decode`` in /metrics, under names of our own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.server.prefill import PrefillCounts


class DecodeFigures(Collector):
    """Figures of a decode server: what it pulled, what failed and why."""

    def __init__(self, remote: RemotePrefill, model_name: str):
        self._remote = remote
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yields the figures."""
        figures, model = self._remote.figures, self._model_name
        yield from _metrics(
            model,
            gauges={
                "remote_prefills_open": (
                    "Prompts whose pages are under way.",
                    figures.open_requests,
                )
            },
            counters={
                "remote_prefills": ("Prompts for which peers were asked.", figures.requests),
                "remote_prefill_pages": ("Pages that were pulled.", figures.pages),
                "remote_prefill_bytes": ("Bytes of pulled pages.", figures.num_bytes),
                "remote_prefill_seconds": ("Time of these requests.", figures.seconds),
            },
        )
        for name, description, counts in (
            ("remote_prefill_failures", "Failed requests to one peer.", figures.failures),
            (
                "remote_prefill_recomputed_pages",
                "Pages that no peer gave. The server computed them itself.",
                figures.recomputed_pages,
            ),
        ):
            counter = CounterMetricFamily(
                f"dsv3:{name}", description, labels=["model_name", "reason"]
            )
            for reason, count in counts.items():
                counter.add_metric([model, reason], count)
            yield counter
        up = GaugeMetricFamily(
            "dsv3:prefill_peer_up",
            "Whether the last request to a prefill server succeeded.",
            labels=["model_name", "peer"],
        )
        for peer, is_up in figures.peers_up.items():
            up.add_metric([model, peer], int(is_up))
        yield up


class PrefillFigures(Collector):
    """Figures of a prefill server: what it gave to decode servers."""

    def __init__(self, counts: PrefillCounts, model_name: str):
        self._counts = counts
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yields the figures."""
        counts = self._counts
        yield from _metrics(
            self._model_name,
            gauges={"prefill_answers_open": ("Answers under way.", counts.open_answers)},
            counters={
                "prefill_prompts": ("Prompts of decode servers.", counts.prompts),
                "prefill_pages": ("Pages that were offered.", counts.pages),
                "prefill_bytes": ("Bytes of offered pages.", counts.num_bytes),
                "prefill_interrupted": ("Answers that ended early.", counts.interrupted),
            },
        )


def _metrics(
    model_name: str,
    gauges: dict[str, tuple[str, float]],
    counters: dict[str, tuple[str, float]],
) -> Iterator[Metric]:
    for kind, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (description, value) in figures.items():
            metric = kind(f"dsv3:{name}", description, labels=["model_name"])
            metric.add_metric([model_name], value)
            yield metric
