"""Memory of a training step by kind, and the settings with which a run fits its devices.

The figures come from the step itself, traced with shapes in place of arrays. So they follow every
change of the model, the losses and the optimizer.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax

from dsv3_jax.training.config import Remat, TrainingConfig
from dsv3_jax.training.liveness import Array, peak
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.trainer import Trainer
from sharding.distributed import max_over_processes

REMAT = typing.get_args(Remat)
"""Policies of recomputation, from the least to the most."""

ACCURACY = 0.05
"""Largest difference between estimate and compiler, relative to the peak of the program."""


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Memory of one device during a training step. All fields are bytes."""

    masters: int
    """Trained parameters in float32."""
    moments: int
    """Moments of the optimizer."""
    frozen: int
    """Weights that are not trained, as stored."""
    compute_weights: int
    """Copies of the weights in the compute dtype."""
    gradients: int
    """Gradients of the trained parameters."""
    activations: int
    """Arrays of the forward pass that the backward pass reads."""
    logits: int
    """Logits and their gradient."""
    workspace: int
    """All other arrays at the moment when memory use is highest."""

    @property
    def peak(self) -> int:
        """Sum of all parts."""
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = [(LABELS[name], value) for name, value in vars(self).items() if value >= 5e7]
        shown = ", ".join(f"{label} {value / 1e9:.1f}" for label, value in parts)
        return f"{self.peak / 1e9:.1f} GB" + (f" ({shown})" if shown else "")


LABELS = {
    "masters": "float32 weights",
    "moments": "optimizer moments",
    "frozen": "frozen weights",
    "compute_weights": "weights in compute dtype",
    "gradients": "gradients",
    "activations": "activations",
    "logits": "logits",
    "workspace": "workspace",
}
"""Label of each field of :class:`TrainingMemory`."""


def step_memory(trainer: Trainer, batch: int, length: int) -> TrainingMemory:
    """Returns the memory of one device during a training step, without compiling it.

    Args:
      trainer: a trainer of an abstract model is enough.
      batch: sequences per step, on all devices together.
      length: tokens per sequence.
    """
    arguments = trainer.step_shapes(batch, length)
    traced = trainer.programs.step.trace(*arguments)
    names, shards, sizes = [], [], dict.fromkeys(("masters", "moments", "frozen", "other"), 0)
    parameters: set[tuple[int, ...]] = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        local = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        name = _argument_name(path)
        names.append(name)
        shards.append(math.prod(leaf.shape) / max(math.prod(local), 1))
        if name == "masters":  # frozen weights have no gradient
            parameters |= {leaf.shape, local}
        sizes[name if name in sizes else "other"] += math.prod(local) * leaf.dtype.itemsize
    moment = peak(traced.jaxpr, names, shards, parameters)
    vocab = trainer.model_config.vocab_size
    kinds = dict.fromkeys(("compute_weights", "gradients", "activations", "logits"), 0)
    for array in moment.arrays:
        if (kind := _kind(array, vocab, parameters)) in kinds:
            kinds[kind] += array.nbytes
    rest = moment.nbytes - sum(kinds.values())
    if rest < 0:  # results that overwrite arrays of another kind
        largest = max(kinds, key=lambda name: kinds[name])
        kinds[largest] += rest
        rest = 0
    return TrainingMemory(
        sizes["masters"],
        sizes["moments"],
        sizes["frozen"],
        **kinds,
        workspace=rest + sizes["other"],
    )


def _argument_name(path: tuple[Any, ...]) -> str:
    """Returns the kind of an argument of the step, by its path in (state, frozen, tokens)."""
    if path[0].idx == 1:
        return "frozen"
    if path[0].idx == 2:
        return "tokens"
    fields = {"params": "masters", "low_bits": "masters", "optimizer": "moments"}
    return fields.get(path[1].name, "other")


def _kind(array: Array, vocab: int, parameters: set[tuple[int, ...]]) -> str:
    if "tokens" not in array.depends_on:
        is_weight = array.depends_on & {"masters", "frozen"} and array.made_by != "all_gather"
        if is_weight:
            return "compute_weights"
        return "gradients" if array.shape in parameters else "workspace"  # zeros to add to
    if array.shape in parameters and len(array.shape) > 1:
        return "gradients"
    if vocab in array.shape:
        return "logits"
    return "activations" if array.is_saved else "workspace"


def alternatives(config: TrainingConfig, sequences: int) -> Iterator[TrainingConfig]:
    """Yields the configurations that compute the same losses with less memory: least recomputation
    first, then fewest microbatches.

    Args:
      sequences: sequences of a batch on one device.
    """
    config = dataclasses.replace(config, remat=config.recomputed)
    for remat in REMAT[REMAT.index(config.recomputed) :]:
        for accumulate in range(config.accumulate, sequences + 1):
            is_doubled = (accumulate / config.accumulate).is_integer()
            is_doubled &= (accumulate // config.accumulate).bit_count() == 1
            changed = dataclasses.replace(config, remat=remat, accumulate=accumulate)
            if is_doubled and sequences % accumulate == 0 and changed != config:
                yield changed


def remedy(
    make_trainer: Callable[[TrainingConfig], Trainer],
    config: TrainingConfig,
    settings: RunSettings,
    available: int,
) -> str:
    """Returns the first of :func:`alternatives` that fits, as flags of ``dsv3 train``, or by how
    much the smallest is too large."""
    layout, least = make_trainer(config).layout, None
    sequences = settings.batch // (1 if layout is None else layout.num_shards("batch"))
    for changed in alternatives(config, sequences):
        memory = step_memory(make_trainer(changed), settings.batch, settings.length)
        flags = _flags(config, changed)
        if memory.peak <= available:
            return f"{flags} needs {memory.peak / 1e9:.1f} GB and fits"
        if least is None or memory.peak < least[0]:
            least = memory.peak, flags
    if least is None:
        return "no other --remat or --accumulate needs less; reduce --batch or --length"
    return (
        f"nothing fits: {least[1]} still needs {(least[0] - available) / 1e9:.1f} GB too much;"
        " reduce --batch or --length, or use more devices"
    )


def _flags(before: TrainingConfig, after: TrainingConfig) -> str:
    flags = []
    if after.recomputed != before.recomputed:
        flags.append(f"--remat {after.remat}")
    if after.accumulate != before.accumulate:
        flags.append(f"--accumulate {after.accumulate}")
    return " ".join(flags)


def available_bytes() -> int | None:
    """Returns the bytes that JAX may allocate on each device, the fewest of all processes, or None
    if there is no limit. All processes must call it together."""
    limits = [(d.memory_stats() or {}).get("bytes_limit") for d in jax.local_devices()]
    least = -max_over_processes(-min((limit for limit in limits if limit), default=math.inf))
    return None if least == math.inf else int(least)


def fitting(
    make_trainer: Callable[[TrainingConfig], Trainer], config: TrainingConfig, settings: RunSettings
) -> TrainingConfig:
    """Returns the configuration with a policy of recomputation with which a training step fits the
    memory of its devices.

    ``remat="auto"`` becomes the first policy that fits even if it needs :data:`ACCURACY` more than
    estimated, or else the last. A step is refused if it does not fit even if it needs that much
    less.

    Raises:
      ValueError: one line with the expected bytes by kind, the available ones, and settings that
        fit.
    """
    *others, last = REMAT if config.remat == "auto" else (config.recomputed,)
    available = available_bytes()
    if available is None:
        return dataclasses.replace(config, remat=config.recomputed)

    def memory_of(policy: Remat) -> TrainingMemory:
        trainer = make_trainer(dataclasses.replace(config, remat=policy))
        return step_memory(trainer, settings.batch, settings.length)

    for policy in others:
        if memory_of(policy).peak <= available / (1 + ACCURACY):
            return dataclasses.replace(config, remat=policy)
    config, memory = dataclasses.replace(config, remat=last), memory_of(last)
    if memory.peak <= available * (1 + ACCURACY):
        return config
    raise ValueError(
        f"memory: expected a step of at most {available / 1e9:.1f} GB per device, got {memory};"
        f" {remedy(make_trainer, config, settings, available)}; --no-check-memory tries it anyway"
    )
