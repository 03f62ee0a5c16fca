"""Compiled steps that engines of the same model and settings share.

Most tests of engines compile for longer than they run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import pytest

import dsv3_jax.engine.engine
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.device.state import SlotState
from dsv3_jax.engine.device.step_input import StepShape

Key = tuple[object, ...]


@contextlib.contextmanager
def shared_programs() -> Iterator[None]:
    """Makes engines lower and compile a step once, however many of them run it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsv3_jax.engine.engine, "Programs", _SharedPrograms)
        yield
    _SharedPrograms.known.clear()


class _SharedPrograms(Programs):
    """Compares all that a program store compares before it loads a program."""

    known: ClassVar[dict[Key, jax.stages.Compiled]] = {}

    def _lower(self, state: SlotState, shape: StepShape) -> Any:
        store = self._store(state, tempfile.gettempdir())  # where it writes nothing
        key = (*sorted(store._fingerprint.items()), repr(shape))
        if key in self.known:
            return _Known(self.known[key])
        return _New(super()._lower(state, shape), key)


@dataclasses.dataclass
class _Known:
    compiled: jax.stages.Compiled

    def compile(self, options: Any = None) -> jax.stages.Compiled:
        return self.compiled


@dataclasses.dataclass
class _New:
    lowered: jax.stages.Lowered
    key: Key

    def compile(self, options: Any = None) -> jax.stages.Compiled:
        compiled = _SharedPrograms.known[self.key] = self.lowered.compile(options)
        return compiled
