"""Hyperparameters of a training run."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

from dsv3_jax.config import MTPHidden

Remat = Literal["none", "norms", "attention+norms", "full"]
"""Policy of recomputation, see :attr:`TrainingConfig.remat`."""
RematChoice = Literal["auto", "none", "norms", "attention+norms", "full"]
"""A policy of recomputation, or ``auto`` for the first one that fits."""
IndexerStage = Literal["none", "dense", "sparse"]
"""Stage of the training of indexers; ``none`` for models without them."""
Optimizer = Literal["adamw", "muon"]
"""Optimizer of matrices; see :mod:`dsv3_jax.training.optimizer`."""

# The V3 report's schedule over 14.8 trillion tokens (section 4.2), as fractions of the run.
_PRETRAINING = 14.8e12
_CONSTANT_UNTIL = 10.0e12 / _PRETRAINING
_DECAYED_BY = 14.3e12 / _PRETRAINING

# A decay by less than 2^-8 can round to no change in bfloat16. The moment would then never fall.
_LARGEST_BFLOAT16_BETA = 0.99
_BFLOAT16_BETAS = f"at most {_LARGEST_BFLOAT16_BETA} with moments_dtype bfloat16"


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Hyperparameters of a training run. The defaults are those of the V3 report (section 4.2),
    except where they depend on the size of the run.

    A run that was recorded before a setting existed is resumed with the setting's default, so the
    default of a new one is what was done without it.

    Fractions refer to ``steps``. Steps count from 0: a value that changes at fraction f has its new
    value from step ``round(f * steps)`` on.

    Raises:
      ValueError: a value is out of range. The message has the name, the expected range and the
        value.
    """

    steps: int
    """Number of optimizer steps of the whole run. Later steps would keep the final values of all
    schedules."""
    learning_rate: float
    """Peak learning rate, that of the last step of the warm-up (2.2e-4 in the report)."""
    final_learning_rate: float
    """Learning rate at the end of the cosine decay (2.2e-5 in the report)."""
    warmup_steps: int = 200
    """Number of steps in which the learning rate rises linearly, from ``1 / warmup_steps`` of the
    peak in the first step (2000 in the report)."""
    decay_start: float = _CONSTANT_UNTIL
    """Fraction at which the cosine decay begins, or the end of the warm-up if that is later."""
    decay_end: float = _DECAYED_BY
    """Fraction at which the cosine decay ends. The learning rate is constant afterwards."""
    optimizer: Optimizer = "adamw"
    """AdamW, or Muon for all matrices but embedding and head, and AdamW for these and the norms.
    Both take the same learning rate and weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""
    moments_dtype: str = "float32"
    """Dtype in which AdamW's moments and Muon's momentum are stored, float32 or bfloat16. Updates
    are computed in float32, and moments are rounded to nearest even when they are stored."""
    weight_decay: float = 0.1
    """Weight decay, multiplied by the learning rate. Vectors (the norms) are exempt."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradient."""
    qk_clip: float = 0.0
    """Largest score of an attention head, above which its queries and keys are scaled down
    (:mod:`dsv3_jax.training.qk_clip`); 100 in Kimi-K2. 0 for no limit."""
    mtp_weight: float = 0.3
    """Factor of the MTP loss before ``mtp_weight_switch``."""
    final_mtp_weight: float = 0.1
    """Factor of the MTP loss from ``mtp_weight_switch`` on."""
    mtp_weight_switch: float = _CONSTANT_UNTIL
    """Fraction at which the factor of the MTP loss changes."""
    mtp_hidden: MTPHidden = "post_norm"
    """Hidden state that the MTP layers receive: before or after the final norm."""
    balance_weight: float = 1e-4
    """Factor alpha of the sequence-wise balance loss, which is summed over MoE layers."""
    bias_update_speed: float = 0.001
    """Step size gamma of the router bias updates."""
    bias_update_end: float = _DECAYED_BY
    """Fraction from which the router biases are constant."""
    document_mask: bool = False
    """Whether a token attends to its own document only. The V3 report packs documents into a
    sequence without such a mask (section 4.1). No loss is taken across documents either way."""
    compute_dtype: str = "bfloat16"
    """Dtype of weights and activations in the forward and backward pass, bfloat16 or float32.
    Master weights and accumulated gradients are float32, and so are embedding, norms and routers
    (:func:`dsv3_jax.training.objective.stays_float32`)."""
    accumulate: int = 1
    """Number of microbatches per step. Activations need memory for one of them."""
    remat: RematChoice | bool = "auto"
    """Recomputation in the backward pass, which saves memory. ``norms`` recomputes what is between
    the matmuls: norms, SwiGLU, rope, the experts' copies of tokens. ``attention+norms`` recomputes
    attention too. ``full`` keeps only each layer's input, and takes a third more arithmetic.
    ``auto`` is the first of ``none`` and these with which a run's step fits the devices. True is
    ``full`` and False ``none``, as in records of earlier versions."""
    scan_layers: bool = False
    """Whether to scan over runs of equal layers, so that only one layer of each run is compiled.

    It is off by default, because stacking the weights and splitting their gradients costs a copy of
    both, and about as much compile time as it saves. It is useful with ``remat`` where the compiler
    would merge the recomputation of an unrolled layer with the original, as XLA does on CPUs."""
    indexer_stage: IndexerStage = "none"
    """Stage of the training of a sparse model's indexers (:mod:`dsv3_jax.training.indexer`)."""
    draft_depth: int = 0
    """Number of drafts in turn for which the MTP layer alone is trained
    (:mod:`dsv3_jax.training.drafts`). 0 trains the model by its own losses instead."""
    lora_rank: int = 0
    """Rank of the low-rank updates of frozen weights (:mod:`dsv3_jax.training.lora`). 0 trains all
    weights instead."""
    lora_alpha: float = 16.0
    """Factor of the low-rank updates, before division by the rank."""
    lora_seed: int = 0
    """Seed of the initial low-rank updates."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "remat", current_settings({"remat": self.remat})["remat"])

        def expect(name: str, is_valid: bool, expected: str) -> None:
            if not is_valid:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

        for name in ("steps", "accumulate"):
            expect(name, getattr(self, name) >= 1, "at least 1")
        for name in ("learning_rate", "clip_norm", "lora_alpha"):
            expect(name, 0 < getattr(self, name) < float("inf"), "a positive number")
        for name in ("warmup_steps", "draft_depth", "lora_rank", "lora_seed"):
            expect(name, getattr(self, name) >= 0, "at least 0")
        for name in (
            "weight_decay",
            "qk_clip",
            "mtp_weight",
            "final_mtp_weight",
            "balance_weight",
            "bias_update_speed",
        ):
            expect(name, 0 <= getattr(self, name) < float("inf"), "a number of at least 0")
        for name in ("decay_start", "decay_end", "mtp_weight_switch", "bias_update_end"):
            expect(name, 0 <= getattr(self, name) <= 1, "a fraction of the steps, 0 to 1")
        expect(
            "final_learning_rate",
            0 <= self.final_learning_rate <= self.learning_rate,
            f"0 to learning_rate, {self.learning_rate}",
        )
        optimizers = typing.get_args(Optimizer)
        expect("optimizer", self.optimizer in optimizers, " or ".join(optimizers))
        expect("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)")
        expect(
            "decay_end",
            self.decay_end > self.decay_start,
            f"more than {self.decay_start}",
        )
        decayed = self.step_at(self.decay_end)
        expect(
            "warmup_steps",
            self.warmup_steps < decayed,
            f"fewer than {decayed} (decay_end)",
        )
        hidden = typing.get_args(MTPHidden)
        expect("mtp_hidden", self.mtp_hidden in hidden, " or ".join(hidden))
        policies = typing.get_args(RematChoice)
        expect("remat", self.remat in policies, " or ".join(policies))
        stages = typing.get_args(IndexerStage)
        expect("indexer_stage", self.indexer_stage in stages, " or ".join(stages))
        dtypes = ("bfloat16", "float32")
        for name in ("compute_dtype", "moments_dtype"):
            expect(name, getattr(self, name) in dtypes, " or ".join(dtypes))
        if self.qk_clip:
            expect("indexer_stage", self.indexer_stage == "none", "none with qk_clip")
            expect("scan_layers", not self.scan_layers, "False with qk_clip")
            for name in ("lora_rank", "draft_depth"):
                expect(name, not getattr(self, name), "0 with qk_clip")
        if self.moments_dtype == "bfloat16":
            expect("betas", max(self.betas) <= _LARGEST_BFLOAT16_BETA, _BFLOAT16_BETAS)

    @property
    def recomputed(self) -> Remat:
        """The policy of :attr:`remat`: ``none`` for ``auto``, as long as no run has chosen one."""
        assert not isinstance(self.remat, bool)  # see __post_init__
        return "none" if self.remat == "auto" else self.remat

    @property
    def freezes_weights(self) -> bool:
        """Whether the trained parameters are not the weights of the whole model."""
        return self.lora_rank > 0 or self.draft_depth > 0 or self.indexer_stage == "dense"

    def mtp_predictions(self, mtp_layers: int) -> int:
        """Returns how many tokens after the next one a position predicts in training: one for each
        MTP layer, or one for each draft."""
        return self.draft_depth or mtp_layers

    def step_at(self, fraction: float) -> int:
        """Returns the step at a fraction of the run."""
        return round(fraction * self.steps)


def current_settings(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the recorded values of settings as this version records them: ``remat`` was a
    boolean."""
    remat = recorded.get("remat")
    if not isinstance(remat, bool):
        return dict(recorded)
    return {**recorded, "remat": "full" if remat else "none"}
