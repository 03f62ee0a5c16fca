"""Shares of a device's peak rates that programs reach, read from measured decode and prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dsv3_jax.simulator.step_work import StepWork


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of a device's peak rates that its programs reach, and what they take besides.

    The default is the roofline itself: a lower bound on time.
    """

    memory: float = 1.0
    arithmetic: float = 1.0
    network: float = 1.0
    pass_seconds: float = 0.0
    """Time of a pass over the layers in which nothing of the above happens: launches, latencies."""
    hides_network: bool = True
    """Whether sending overlaps with the rest, as with two micro-batches. Otherwise it adds to
    it."""

    def __post_init__(self) -> None:
        for name in ("memory", "arithmetic", "network"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name}: expected a share above 0 and at most 1, got {value}")
        if not self.pass_seconds >= 0:
            raise ValueError(f"pass_seconds: expected 0 or more, got {self.pass_seconds}")


class PeakTimes(Protocol):
    """Step times at peak rates, as :class:`dsv3_jax.simulator.step_times.StepModel` has them."""

    def parts(self, work: StepWork) -> dict[str, float]: ...


def measured(
    model: PeakTimes, decode: Sequence[Mapping[str, Any]], prefill: Sequence[Mapping[str, Any]]
) -> Efficiency:
    """Returns what one device reached in results of ``scripts/bench_decode.py``.

    Decode gives the share of the memory bandwidth and the time of a pass, by least squares of
    relative errors over batch sizes and contexts. Prefill gives the mean share of the arithmetic.

    Args:
      model: step times of the measured model on the measured device at peak rates.
      decode: rows of the phase ``decode`` without drafts.
      prefill: rows of the phase ``prefill``.
    """
    seconds = np.array([1e-3 * row["ms"] for row in decode])
    bounds = np.array([_bound(model.parts(_decode_work(row))) for row in decode])
    terms = np.stack([np.ones_like(bounds), bounds], axis=1) / seconds[:, None]
    (pass_seconds, inverse), *_ = np.linalg.lstsq(terms, np.ones(len(decode)), rcond=None)
    arithmetic = []
    for row in prefill:
        starts = range(0, row["context"], row["chunk"])
        passes = [model.parts(_prefill_work(row, start))["arithmetic"] for start in starts]
        arithmetic.append(sum(passes) / (1e-3 * row["ms"]))
    return Efficiency(
        memory=min(1.0, float(1 / inverse)),
        arithmetic=min(1.0, float(np.mean(arithmetic))),
        pass_seconds=max(0.0, float(pass_seconds)),
    )


def _bound(parts: Mapping[str, float]) -> float:
    return max(parts["weights"] + parts["cache"], parts["arithmetic"])


def _decode_work(row: Mapping[str, Any]) -> StepWork:
    batch, keys = row["batch"], row["batch"] * row["context"]
    return StepWork(batch, batch, keys, keys, 0, 0, 0, 0, batch)


def _prefill_work(row: Mapping[str, Any], start: int) -> StepWork:
    batch, count = row["batch"], min(row["chunk"], row["context"] - start)
    pairs = batch * count * (2 * start + count + 1) // 2
    tokens, keys = batch * count, batch * (start + count)
    return StepWork(0, 0, 0, 0, batch, tokens, keys, pairs, tokens)
