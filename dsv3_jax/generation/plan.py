"""What a caller asks of speculation, checked before anything runs."""

from __future__ import annotations

import dataclasses

from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.depth import AUTO_DEPTHS
from dsv3_jax.generation.drafters import Drafter, MTPDrafter, NgramDrafter, SyntheticDrafter
from dsv3_jax.generation.settings import check_draft, parse_draft, unknown_draft


@dataclasses.dataclass(frozen=True)
class DraftPlan:
    """How one call drafts."""

    drafter: Drafter | None = None
    depths: tuple[int, ...] = (0,)
    """Drafts a step: one number, or those to choose from."""

    @property
    def most(self) -> int:
        return max(self.depths)

    @classmethod
    def read(
        cls, draft: str | Drafter | None, draft_depth: int | str, config: ModelConfig
    ) -> DraftPlan:
        """From the arguments of a call.

        Raises:
          ValueError: no such drafter, a depth out of range, or a model that cannot draft so.
        """
        check_draft(draft, draft_depth)
        if draft is None:
            return cls()
        drafter = _named(draft) if isinstance(draft, str) else draft
        if not isinstance(drafter, Drafter):
            raise unknown_draft(draft)
        if drafter.mtp_hidden is not None and not config.num_nextn_predict_layers:
            raise ValueError(
                f"draft: expected a model with an MTP layer for {drafter.name!r}, got one without "
                "(a checkpoint that lacks it, or load(mtp=False))"
            )
        return cls(drafter, AUTO_DEPTHS if draft_depth == "auto" else (int(draft_depth),))


def _named(draft: str) -> Drafter:
    kind, rate = parse_draft(draft)
    if rate is not None:
        return SyntheticDrafter(rate)
    return MTPDrafter() if kind == "mtp" else NgramDrafter()
