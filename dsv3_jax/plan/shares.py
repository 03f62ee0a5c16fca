"""One device's part of a model, for many deployments of the same few models."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from dsv3_jax.logical_axes import check_layout
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import Shapes, Share


class Shares:
    """Shares by deployment. The shapes of a large model take seconds to make, and its parts on a
    layout tenths of one, so each is made once and kept for as long as this object lives."""

    def __init__(self) -> None:
        self._shapes: dict[Hashable, Shapes] = {}
        self._shares: dict[Hashable, Share | str] = {}

    def of(self, plan: Deployment) -> Share:
        """Returns what one device holds.

        Raises:
          ValueError: no such layout on this number of devices, parameters that cannot be cut as it
            says, an exchange that cannot run, or a batch that does not divide.
        """
        layout = plan.layout
        check_layout(plan.config, layout, plan.config.n_routed_experts + plan.redundant_experts)
        layout.check_batch(plan.batch)
        key = _model(plan), plan.layout_name, plan.target.devices
        if key not in self._shares:
            try:
                self._shares[key] = self._shapes_of(plan).on(layout)
            except ValueError as refusal:
                self._shares[key] = str(refusal)
        share = self._shares[key]
        if isinstance(share, str):
            raise ValueError(share)
        return dataclasses.replace(share, layout=layout)  # parts do not depend on the exchange

    def _shapes_of(self, plan: Deployment) -> Shapes:
        if (model := _model(plan)) not in self._shapes:
            self._shapes[model] = Shapes.of(
                plan.config,
                plan.quantization,
                mtp=plan.mtp,
                redundant_experts=plan.redundant_experts,
            )
        return self._shapes[model]


def _model(plan: Deployment) -> Hashable:
    """What of a deployment its arrays depend on."""
    return plan.config, plan.quantization, plan.mtp, plan.redundant_experts
