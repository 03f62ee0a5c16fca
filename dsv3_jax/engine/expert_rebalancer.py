"""Moves experts between devices while an engine serves, as the loads of experts change.

The engine's steps count the tokens that choose each expert. From these counts, EPLB
(:mod:`sharding.eplb`) decides which experts get replicas and which device has which; the weights
move, and the next step runs with the new placement. Tokens stay the same: a placement decides where
an expert runs, and not what it computes.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

import jax
import numpy as np

from dsv3_jax.engine.engine import Engine
from dsv3_jax.generation.errors import EngineError
from dsv3_jax.model import DeepSeekV3
from sharding import Placement

logger = logging.getLogger(__name__)

_WORTH = 0.98
"""Largest ratio of the new imbalance to the old one that is worth moving weights for."""


class Rebalance(NamedTuple):
    """Result of :meth:`ExpertRebalancer.rebalance`."""

    tokens: int
    """Choices of experts that were counted."""
    before: float
    """Load of the busiest device divided by the mean, averaged over layers: 1 is balanced."""
    after: float
    """The same with the best placement for these counts."""
    has_moved: bool
    """Whether the engine runs with the new placement."""


class ExpertRebalancer:
    """Rebalances the experts of one engine.

    A move needs memory for a second copy of the routed experts, until the first one is freed.

    Args:
      engine: an engine with ``count_routing=True``.
      model: its model, with placed experts: ``load(placement=Placement.identity(L, E, slots))``.
        The rebalancer keeps the current model; the caller should not.
      nodes: number of nodes over which the expert devices divide.
      interval: seconds between two calls of :meth:`rebalance` in a thread of its own. None leaves
        the calls to the caller.
      least_tokens: counted choices per layer below which nothing moves.

    Raises:
      ValueError: the model's experts are not placed, or are all on one device.
    """

    def __init__(
        self,
        engine: Engine,
        model: DeepSeekV3,
        *,
        nodes: int = 1,
        interval: float | None = None,
        least_tokens: int = 10_000,
    ):
        self._devices = 1 if model.layout is None else model.layout.num_shards("expert")
        if self._devices == 1:
            raise ValueError("model: expected experts on several devices, got all of them on one")
        layers = model.moe_layers()
        replicas = [moe.replicas for moe in layers]
        if any(each is None for each in replicas):
            raise ValueError(
                "model: expected placed experts, as load(placement=...) returns them, got none"
            )
        if interval is not None and not interval > 0:
            raise ValueError(f"interval: expected seconds above 0, got {interval}")
        self._engine, self._model, self._nodes = engine, model, nodes
        self._least_tokens = least_tokens
        self._slots = layers[0].num_slots
        self._placed = np.stack(
            [_experts_of_slots(np.asarray(r.log2phy), self._slots) for r in replicas if r]
        )
        self._counts = np.zeros((len(layers), model.config.n_routed_experts), np.int64)
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if interval is not None:
            self._thread = threading.Thread(
                target=self._run, args=(interval,), name="dsv3-experts", daemon=True
            )
            self._thread.start()

    def rebalance(self) -> Rebalance:
        """Places the experts by the tokens since the last move, if there are enough of them and the
        busiest device would get less to do. Steps go on while weights move.

        Raises:
          EngineError: the engine failed or was shut down.
        """
        self._counts += self._engine.take_routing_counts()
        tokens = int(self._counts.sum())
        before = imbalance(self._counts, self._placed, self._devices)
        if tokens < self._least_tokens * len(self._counts):
            return Rebalance(tokens, before, before, False)
        groups = self._model.config.n_group
        placement = Placement.balanced(
            self._counts, self._slots, groups, self._nodes, self._devices
        )
        placed = np.asarray(placement.phy2log)
        after = imbalance(self._counts, placed, self._devices)
        self._counts[:] = 0
        if after > _WORTH * before:
            return Rebalance(tokens, before, after, False)
        model = self._model.place_experts(placement)
        self._engine.use(model, keep_prefix_cache=True)
        self._model, self._placed = model, placed
        logger.info("experts moved: imbalance %.3f, was %.3f", after, before)
        return Rebalance(tokens, before, after, True)

    def close(self) -> None:
        """Ends the thread, after a move under way."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, interval: float) -> None:
        while not self._is_closed.wait(interval):
            try:
                self.rebalance()
            except EngineError:
                return  # there is nothing left to balance
            except jax.errors.JaxRuntimeError as error:  # such as a lack of memory for the copy
                logger.warning("experts were not moved: %s", error)


def imbalance(counts: np.ndarray, phy2log: np.ndarray, devices: int) -> float:
    """Returns the load of the busiest device divided by the mean, averaged over layers with load.

    Args:
      counts: [L, E], tokens of each expert. Replicas of an expert share them equally.
      phy2log: [L, P], expert in each slot.
    """
    ratios = []
    for load, experts in zip(counts, phy2log, strict=True):
        if not load.any():
            continue
        replicas = np.bincount(experts, minlength=len(load))
        of_devices = (load / replicas)[experts].reshape(devices, -1).sum(axis=1)
        ratios.append(of_devices.max() / of_devices.mean())
    return float(np.mean(ratios)) if ratios else 1.0


def _experts_of_slots(log2phy: np.ndarray, slots: int) -> np.ndarray:
    """Returns the expert in each slot, from the slots of each expert."""
    experts = np.empty(slots, np.int64)
    for expert, own in enumerate(np.asarray(log2phy)):
        experts[own[own >= 0]] = expert
    return experts
