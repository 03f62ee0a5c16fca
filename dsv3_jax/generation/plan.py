"""The settings of speculation, checked before anything runs."""

from __future__ import annotations

import dataclasses

from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.depth import AUTO_DEPTHS
from dsv3_jax.generation.drafters import Drafter, MTPDrafter, NgramDrafter, SyntheticDrafter
from dsv3_jax.generation.settings import check_draft, parse_draft, unknown_draft


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """The drafter of one call, and the depths that it may use."""

    drafter: Drafter | None = None
    depths: tuple[int, ...] = (0,)
    """Numbers of drafts per step to choose from. A single entry is a fixed depth."""

    @property
    def max_depth(self) -> int:
        """Maximum number of drafts per step."""
        return max(self.depths)

    @classmethod
    def read(
        cls, draft: str | Drafter | None, draft_depth: int | str, config: ModelConfig
    ) -> DraftPlan:
        """Interprets the arguments ``draft`` and ``draft_depth`` of :meth:`Generator.generate`.

        Raises:
          ValueError: ``draft`` is not a drafter, the depth is out of range, or the model has no MTP
            layer although the drafter needs one.
        """
        check_draft(draft, draft_depth)
        if draft is None:
            return cls()
        drafter = _drafter(draft) if isinstance(draft, str) else draft
        if not isinstance(drafter, Drafter):
            raise unknown_draft(draft)
        if drafter.mtp_hidden is not None and not config.num_nextn_predict_layers:
            raise ValueError(
                f"draft: expected a model with an MTP layer for {drafter.name!r}, got one without "
                "(a checkpoint that lacks it, or load(mtp=False))"
            )
        return cls(drafter, AUTO_DEPTHS if draft_depth == "auto" else (int(draft_depth),))


def _drafter(draft: str) -> Drafter:
    kind, rate = parse_draft(draft)
    if rate is not None:
        return SyntheticDrafter(rate)
    return MTPDrafter() if kind == "mtp" else NgramDrafter()
