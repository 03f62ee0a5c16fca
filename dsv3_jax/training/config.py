"""Constants of a training run."""

from __future__ import annotations

import dataclasses
import typing

from dsv3_jax.config import MTPHidden

# The V3 report's run of 14.8 trillion tokens (section 4.2), as fractions: a run of another length
# keeps its shape.
_PRETRAINING = 14.8e12
_CONSTANT_UNTIL = 10.0e12 / _PRETRAINING
_DECAYED_BY = 14.3e12 / _PRETRAINING


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Constants of a run. Defaults are the V3 report's (section 4.2) wherever those scale.

    Fractions are of ``steps``. Steps count from 0: a value that changes at fraction f has its new
    value at step ``round(f * steps)``.

    Raises:
      ValueError: a value that no run can have, with what was expected and what came.
    """

    steps: int
    """Optimiser steps of the whole run. What lies behind them keeps the final values."""
    learning_rate: float
    """The largest, reached at the end of the warm-up (the report's: 2.2e-4)."""
    final_learning_rate: float
    """Where the cosine ends (the report's: 2.2e-5)."""
    warmup_steps: int = 200
    """Steps in which the learning rate rises linearly from 0 (the report's: 2000)."""
    decay_start: float = _CONSTANT_UNTIL
    """Fraction up to which the learning rate stays constant, or the end of the warm-up if later."""
    decay_end: float = _DECAYED_BY
    """Fraction at which the cosine has come down to the final learning rate, which then stays."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moments."""
    weight_decay: float = 0.1
    """AdamW's, times the learning rate; vectors (the norms) are exempt."""
    clip_norm: float = 1.0
    """Largest norm of the gradient of all parameters together."""
    mtp_weight: float = 0.3
    """Factor of the MTP loss at first."""
    final_mtp_weight: float = 0.1
    """Factor of the MTP loss from ``mtp_weight_switch`` on."""
    mtp_weight_switch: float = _CONSTANT_UNTIL
    """Fraction at which the MTP loss's factor changes."""
    mtp_hidden: MTPHidden = "post_norm"
    """Which hidden state feeds the MTP layers."""
    balance_weight: float = 1e-4
    """Factor alpha of the sequence-wise balance loss, which is summed over MoE layers."""
    bias_update_speed: float = 0.001
    """Step gamma of the routers' biases."""
    bias_update_end: float = _DECAYED_BY
    """Fraction from which the routers' biases stay as they are."""
    compute_dtype: str = "bfloat16"
    """Of weights and activations in forward and backward pass, or float32. Master weights,
    gradients' sums and moments are float32."""
    accumulate: int = 1
    """Equal parts of a batch, computed one after the other: memory for one of them is enough."""
    remat: bool = False
    """Keep only each layer's input for the backward pass, and compute the rest of it again."""
    scan_layers: bool = False
    """Compile one layer of every run of equal layers, and loop over it. Off, because stacking the
    weights and taking their gradients apart costs a copy of both, and about as much compilation as
    it saves. Worth it beside ``remat`` where the compiler would merge the second computation of an
    unrolled layer with the first, as XLA does for CPUs."""
    lora_rank: int = 0
    """Rank of trained updates of frozen weights (see :mod:`dsv3_jax.training.lora`); 0 trains all
    weights themselves."""
    lora_alpha: float = 16.0
    """The updates' factor, times the rank."""
    lora_seed: int = 0
    """Of the updates' initial values."""

    def __post_init__(self) -> None:
        def expect(name: str, fits: bool, expected: str) -> None:
            if not fits:
                raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

        for name in ("steps", "accumulate"):
            expect(name, getattr(self, name) >= 1, "at least 1")
        for name in ("learning_rate", "clip_norm", "lora_alpha"):
            expect(name, 0 < getattr(self, name) < float("inf"), "a positive number")
        for name in ("warmup_steps", "lora_rank", "lora_seed"):
            expect(name, getattr(self, name) >= 0, "at least 0")
        for name in (
            "weight_decay",
            "mtp_weight",
            "final_mtp_weight",
            "balance_weight",
            "bias_update_speed",
        ):
            expect(name, 0 <= getattr(self, name) < float("inf"), "a number of at least 0")
        for name in ("decay_start", "decay_end", "mtp_weight_switch", "bias_update_end"):
            expect(name, 0 <= getattr(self, name) <= 1, "a fraction of steps, 0 to 1")
        expect(
            "final_learning_rate",
            0 <= self.final_learning_rate <= self.learning_rate,
            f"0 to learning_rate, {self.learning_rate}",
        )
        expect("betas", all(0 <= beta < 1 for beta in self.betas), "two of at least 0, less than 1")
        expect("decay_end", self.decay_end > self.decay_start, f"past {self.decay_start}")
        decayed = self.at(self.decay_end)
        expect("warmup_steps", self.warmup_steps < decayed, f"fewer than {decayed} of {self.steps}")
        hidden = typing.get_args(MTPHidden)
        expect("mtp_hidden", self.mtp_hidden in hidden, " or ".join(hidden))
        dtypes = ("bfloat16", "float32")
        expect("compute_dtype", self.compute_dtype in dtypes, " or ".join(dtypes))

    def at(self, fraction: float) -> int:
        """The step at a fraction of the run."""
        return round(fraction * self.steps)
