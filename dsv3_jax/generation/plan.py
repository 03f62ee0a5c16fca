"""What a caller asks of speculation, checked before anything runs."""

from __future__ import annotations

import dataclasses
import numbers

from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.depth import AUTO_DEPTHS, MAX_DEPTH
from dsv3_jax.generation.drafters import Drafter, MTPDrafter, NgramDrafter, SyntheticDrafter
from dsv3_jax.generation.request import check


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
        if draft_depth != "auto":
            expected = f"an integer from 1 to {MAX_DEPTH}, or 'auto'"
            check("draft_depth", draft_depth, expected, numbers.Integral, 1, MAX_DEPTH)
        if draft is None:
            return cls()
        drafter = _named(draft) if isinstance(draft, str) else draft
        if not isinstance(drafter, Drafter):
            raise _unknown(draft)
        if drafter.mtp_hidden is not None and not config.num_nextn_predict_layers:
            raise ValueError(
                f"draft: expected a model with an MTP layer for {drafter.name!r}, got one without "
                "(a checkpoint that lacks it, or load(mtp=False))"
            )
        return cls(drafter, AUTO_DEPTHS if draft_depth == "auto" else (int(draft_depth),))


def _named(draft: str) -> Drafter:
    """The drafter called ``mtp``, ``ngram`` or ``synthetic:RATE``."""
    kind, _, rate = draft.partition(":")
    if kind == "synthetic":
        try:
            return SyntheticDrafter(float(rate))
        except ValueError:
            raise _unknown(draft) from None
    if draft in ("mtp", "ngram"):
        return MTPDrafter() if draft == "mtp" else NgramDrafter()
    raise _unknown(draft)


def _unknown(draft: object) -> ValueError:
    return ValueError(
        "draft: expected None, 'mtp', 'ngram', 'synthetic:RATE' with a rate from 0 to 1, or a "
        f"Drafter; got {draft!r}"
    )
