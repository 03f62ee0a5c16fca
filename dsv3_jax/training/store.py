"""Checkpoints of a run, through orbax: everything that the next step depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from dsv3_jax.training.step import TrainingState

_BATCHES = "batches"


class Store:
    """The numbered checkpoints in a directory, the last ``keep`` of them; None keeps all.

    A checkpoint is a folder ``<step>`` with an item for each field of the training state and one
    for the batches' iterator. It is written under another name, which it sheds when all of it is on
    disk: a save that was cut short leaves nothing that :meth:`latest` would see.
    """

    def __init__(self, directory: Path, keep: int | None):
        # orbax tells its whole story at these levels, on stderr.
        logging.set_verbosity(logging.ERROR)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            # Steps donate their state: a save in the background could read what they overwrite.
            enable_async_checkpointing=False,
        )
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def save(self, state: TrainingState, batches: dict[str, Any]) -> None:
        items: dict[str, Any] = {
            name: ocp.args.StandardSave(_named(part)) for name, part in _with_leaves(state).items()
        }
        items[_BATCHES] = ocp.args.JsonSave(batches)
        self._manager.save(int(state.step), args=ocp.args.Composite(**items), force=True)

    def steps(self) -> list[int]:
        """Of the whole checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def restore(self, step: int, like: TrainingState) -> tuple[TrainingState, dict[str, Any]]:
        """The state after ``step`` steps and its iterator's, bit for bit.

        Args:
          like: shapes and dtypes, as ``trainer.shapes()`` gives them, and where they have one the
            sharding: each device's part alone is read, whatever devices saved it. A field without
            leaves is not read, and stays.
        """
        wanted = _with_leaves(like)
        items: dict[str, Any] = {
            name: ocp.args.StandardRestore(jax.tree.map(_wanted, _named(part)))
            for name, part in wanted.items()
        }
        items[_BATCHES] = ocp.args.JsonRestore()
        found = self._manager.restore(step, args=ocp.args.Composite(**items))
        parts = {
            name: jax.tree.unflatten(
                jax.tree.structure(part), [_array(found[name][leaf]) for leaf in _named(part)]
            )
            for name, part in wanted.items()
        }
        return like._replace(**parts), found[_BATCHES]

    def close(self) -> None:
        self._manager.close()


def _with_leaves(state: TrainingState) -> dict[str, Any]:
    """Fields by name; a model that scores with a softmax has no biases to keep."""
    return {name: part for name, part in state._asdict().items() if jax.tree.leaves(part)}


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by their path, such as ``layers.0.self_attn.o_proj.weight``."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # A leaf that is the whole tree has no path.
        named[jax.tree_util.keystr(path, simple=True, separator=".") or "value"] = leaf
    return named


def _wanted(leaf: jax.ShapeDtypeStruct) -> np.ndarray | jax.ShapeDtypeStruct:
    if leaf.sharding is not None:
        return leaf
    # What orbax puts on a device itself is bound to that device, and to jit another program than
    # the one that the run began with: it would be compiled again, and might round differently.
    return np.empty(leaf.shape, leaf.dtype)


def _array(found: np.ndarray | jax.Array) -> jax.Array:
    return found if isinstance(found, jax.Array) else jnp.array(found)
