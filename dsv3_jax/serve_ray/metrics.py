"""The figures of all replicas in one text, each with a label ``replica``."""

from __future__ import annotations

from collections.abc import Mapping

import prometheus_client
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def merged(texts: Mapping[str, str]) -> bytes:
    """Returns the figures of all replicas in Prometheus' text format.

    Args:
      texts: the text of each replica, by its id.
    """
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                known.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    return prometheus_client.generate_latest(_Families(families))  # pyright: ignore[reportArgumentType]


class _Families:
    """Stands in for a registry."""

    def __init__(self, families: Mapping[str, Metric]):
        self._families = families

    def collect(self) -> list[Metric]:
        """Returns the figures."""
        return list(self._families.values())
