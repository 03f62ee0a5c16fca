"""Checkpoints of the training state and of the data iterator, written by orbax."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging

from dsv3_jax.training.state import TrainingState, joined, split

_BATCHES = "batches"
_UNFINISHED = ".orbax-checkpoint-tmp"
_LONGEST_WRITE_SECONDS = 60  # of one thread, after another has failed


class CheckpointStore:
    """The checkpoints of a run, in a directory with a folder ``<step>`` for each.

    A checkpoint has one orbax item per field of the training state and one for the state of the
    batch iterator. All parameters are float32 in it, whatever form the state has them in. It is
    written under a temporary name and renamed when it is complete, so an interrupted save leaves no
    checkpoint that :meth:`steps` would list.

    Args:
      directory: directory of the checkpoints, which is created.
      keep: number of latest checkpoints to keep. None keeps all.
    """

    def __init__(self, directory: Path, keep: int | None):
        # At lower levels orbax logs every step of its work, and every error that it raises.
        absl_logging.set_verbosity(absl_logging.FATAL)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            # A save in the background could read arrays that the next step has already overwritten,
            # because steps donate their state.
            enable_async_checkpointing=False,
        )
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def save(self, state: TrainingState, batches: dict[str, Any]) -> None:
        """Writes the checkpoint of ``state.step``.

        Args:
          batches: state of the batch iterator, in JSON types.

        Raises:
          OSError: the disk is full, or the system has refused to write for another reason. The
            complete checkpoints stay. What was written of this one is deleted, except what orbax's
            threads are still writing, which :meth:`remove_unfinished` deletes in a resumed run.
        """
        step = int(state.step)
        items: dict[str, Any] = {
            name: ocp.args.StandardSave(_named_leaves(field))
            for name, field in _fields_with_leaves(_stored(state)).items()
        }
        items[_BATCHES] = ocp.args.JsonSave(batches)
        number = None
        with _later_errors_ignored():
            try:
                self._manager.save(step, args=ocp.args.Composite(**items), force=True)
            except Exception as error:
                if (number := _system_error(error)) is None:
                    raise
            if number is not None:
                _end_writes()
        if number is not None:
            self.remove_unfinished()
            directory = str(self._manager.directory / str(step))
            raise OSError(number, os.strerror(number), directory)

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in ascending order."""
        return sorted(self._manager.all_steps())

    def restore(
        self, step: int, abstract_state: TrainingState
    ) -> tuple[TrainingState, dict[str, Any]]:
        """Returns the training state after ``step`` steps, bit for bit, and the state of the batch
        iterator.

        Args:
          abstract_state: shapes, dtypes and shardings of the result, as in
            ``Trainer.abstract_state``. Each device reads only its shards, whatever mesh has saved
            them. A field without leaves is not read.
        """
        shapes = jax.eval_shape(joined, abstract_state)
        stored = jax.tree.map(
            lambda shape, leaf: jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=leaf.sharding
            ),
            shapes,
            abstract_state._replace(low_bits=None),
        )
        fields = _fields_with_leaves(stored)
        items: dict[str, Any] = {
            name: ocp.args.StandardRestore(jax.tree.map(_restore_target, _named_leaves(field)))
            for name, field in fields.items()
        }
        items[_BATCHES] = ocp.args.JsonRestore()
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        arrays = {
            name: jax.tree.unflatten(
                jax.tree.structure(field),
                [_to_jax(restored[name][leaf]) for leaf in _named_leaves(field)],
            )
            for name, field in fields.items()
        }
        state = stored._replace(**arrays)
        if abstract_state.low_bits is not None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
            state = jax.jit(split, donate_argnums=0, out_shardings=shardings)(state)
        return state, restored[_BATCHES]

    def remove_unfinished(self) -> None:
        """Deletes what a save that failed or was killed has left. No other process may be saving
        to the directory."""
        for directory in Path(self._manager.directory).glob(f"*{_UNFINISHED}*"):
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        self._manager.close()


def recorded_steps(directory: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory, which need not exist, in
    ascending order. Unlike :class:`CheckpointStore`, it only lists the directory."""
    names = [path.name for path in directory.glob("*")]
    return sorted(int(name) for name in names if name.isdecimal())


@contextlib.contextmanager
def _later_errors_ignored() -> Iterator[None]:
    """Keeps errors that follow the first one of a failed save off stderr: of futures that nothing
    waits for any more, which asyncio logs, and of tensorstore's callbacks, whose event loop orbax
    has closed."""
    asyncio_logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
    level = asyncio_logger.level

    def report(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = report
    asyncio_logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        asyncio_logger.setLevel(level)
        sys.unraisablehook = hook


def _end_writes() -> None:
    """Waits for orbax's threads after a failed save, and collects their futures."""
    for thread in threading.enumerate():
        # orbax has its own class, whose join raises the thread's error. Plain threads belong to
        # pools and do not end.
        if type(thread).__module__.startswith("orbax."):
            threading.Thread.join(thread, _LONGEST_WRITE_SECONDS)
    gc.collect()


def _system_error(error: BaseException) -> int | None:
    """Returns the system's error number, or None for an error that is not the system's.

    tensorstore raises a ValueError whose text has the number.
    """
    if isinstance(error, OSError):
        return error.errno
    number = re.search(r"\[os_error_code='(\d+)'\]", str(error))
    return None if number is None else int(number[1])


def _stored(state: TrainingState) -> TrainingState:
    """Returns the form of a state in a checkpoint."""
    if state.low_bits is None:
        return state
    # The moments, which are the larger part, stay where they are.
    return jax.jit(joined)(state._replace(optimizer=()))._replace(optimizer=state.optimizer)


def _fields_with_leaves(state: TrainingState) -> dict[str, Any]:
    """Returns the non-empty fields by name. A model whose router scores with a softmax has no
    biases."""
    return {name: field for name, field in state._asdict().items() if jax.tree.leaves(field)}


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves by path, such as ``layers.0.self_attn.o_proj.weight``."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # The path is empty if the leaf is the whole tree.
        leaves[jax.tree_util.keystr(path, simple=True, separator=".") or "value"] = leaf
    return leaves


def _restore_target(leaf: jax.ShapeDtypeStruct) -> np.ndarray | jax.ShapeDtypeStruct:
    """Returns the form in which orbax restores a leaf: sharded, or as a NumPy array."""
    if leaf.sharding is not None:
        return leaf
    # An array that orbax places on a device is committed to that device. jit would compile another
    # program for it than for the state that the run began with, and that could round differently.
    return np.empty(leaf.shape, leaf.dtype)


def _to_jax(array: np.ndarray | jax.Array) -> jax.Array:
    return array if isinstance(array, jax.Array) else jnp.array(array)
