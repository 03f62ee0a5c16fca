"""The metrics of a run: metrics.jsonl, with one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsv3_jax.accounting import active_parameters, flops_per_token
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_write, naming
from dsv3_jax.training.lora import Updates
from dsv3_jax.training.step import Metrics
from sharding.distributed import barrier

# Peak dense bfloat16 FLOP/s by prefix of the device kind. A longer prefix comes before a shorter
# one that it begins with. Sources: NVIDIA's data sheets (without sparsity),
# cloud.google.com/tpu/docs.
_PEAKS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989.4e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "TPU v6 lite": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


def training_flops_per_token(
    config: ModelConfig, length: int, updates: Updates | None = None
) -> float:
    """Returns ``3 (F + M (2 (P_mtp + D W) + A / L))``: the backward pass takes twice the operations
    of the forward pass.

    F is the number of forward operations per token of the main model in sequences of ``length``
    tokens (:func:`dsv3_jax.accounting.flops_per_token`): 2 per active matrix element, plus
    attention A. Each of the M MTP layers adds its own active parameters P_mtp, the shared head (D
    W), and the attention of one of L layers. Recomputation by ``remat`` is not counted.

    With low-rank ``updates``, matmuls with frozen matrices count twice, forward and gradient by
    their input, attention and the updates' own matmuls three times, and scores of an indexer once.
    The embedding is frozen, so that nothing before the first layer has a gradient: its first two
    projections have none by their input.

    Args:
      updates: low-rank updates that are trained, or their shapes. None if all weights are.
    """
    forward, M = flops_per_token(config, length, "prefill"), config.num_nextn_predict_layers
    head = config.hidden_size * config.vocab_size
    linear = forward.linear + M * 2 * (active_parameters(config).mtp + head)
    attention = forward.attention * (1 + M / config.num_hidden_layers)
    if updates is None:
        return 3 * (linear + attention + forward.indexer)
    low_rank = sum(math.prod(x.shape) for update in updates.values() for x in update)
    first = [updates.get(f"layers.0.self_attn.{name}.weight") for name in _FIRST_PROJECTIONS]
    no_gradient = sum(u.a.shape[1] * (u.b.shape[0] + u.a.shape[0]) for u in first if u is not None)
    return 2 * linear + 3 * attention + forward.indexer + 3 * 2 * low_rank - 2 * no_gradient


_FIRST_PROJECTIONS = "q_proj", "q_a_proj", "kv_a_proj_with_mqa"
"""Projections of a layer's input. A model has two of these."""


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak dense bfloat16 FLOP/s of a device, or None if it is unknown."""
    return next((peak for name, peak in _PEAKS.items() if device_kind.startswith(name)), None)


def utilisation(
    config: ModelConfig,
    length: int,
    tokens_per_second: float,
    device_kind: str,
    dtype: str,
    updates: Updates | None = None,
) -> float | None:
    """Returns the model FLOPs utilisation: achieved divided by peak FLOP/s (PaLM, arXiv 2204.02311,
    appendix B). It is None if the peak is unknown or the run does not compute in bfloat16.

    Args:
      tokens_per_second: throughput of one device.
      dtype: dtype of the computation.
      updates: as in :func:`training_flops_per_token`.
    """
    peak = peak_flops(device_kind)
    if peak is None or dtype != "bfloat16":
        return None
    return tokens_per_second * training_flops_per_token(config, length, updates) / peak


Entry = dict[str, Any]
"""One line of metrics.jsonl. :func:`~dsv3_jax.training.run.train` documents its keys."""


class MetricsLog:
    """Appends entries to metrics.jsonl.

    A resumed run continues from a checkpoint and computes the metrics after it again, so entries
    after the checkpoint are removed first. Only the first process of a run writes the file; the
    others keep the entries in memory.

    Args:
      path: the file, which is created if it does not exist.
      step: last step whose entry is kept.
    """

    entries: list[Entry]
    """All entries of the run, in order."""

    def __init__(self, path: Path, step: int = -1):
        self.entries = [entry for entry in read_metrics(path) if entry["step"] <= step]
        barrier("metrics read")
        self._path, self._file = path, None
        if jax.process_index():
            return
        atomic_write(path, "".join(map(_line, self.entries)))
        self._file = path.open("a", encoding="utf-8")

    def append(self, entry: Entry) -> None:
        """Appends an entry.

        Raises:
          ValueError: a loss or norm in it is not finite.
          OSError: the disk is full. The error names the file.
        """
        if message := divergence(entry):
            raise ValueError(message)
        self.entries.append(entry)
        if self._file is not None:
            with naming(self._path):
                self._file.write(_line(entry))
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            # Complete entries have been flushed. What may remain is one that could not be written.
            with contextlib.suppress(OSError):
                self._file.close()


def read_metrics(path: Path) -> list[Entry]:
    """Returns the entries of a metrics.jsonl, or none if there is no such file. An incomplete last
    line is ignored.

    Raises:
      ValueError: another line is not a JSON object with a step.
    """
    return list(_complete_entries(path)) if path.is_file() else []


def _complete_entries(path: Path) -> Iterator[Entry]:
    for number, line in enumerate(path.read_text("utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            return
        try:
            entry = json.loads(line)
            entry["step"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with a step, got {line[:60]!r}"
            ) from None
        yield entry


def _line(entry: Entry) -> str:
    # JSON has the shortest decimal that is read back as the same float.
    return json.dumps(entry, allow_nan=False) + "\n"


def metrics_entry(step: int, metrics: Metrics) -> Entry:
    """Returns the entry of one step: ``losses`` and scalars by name, and for each MoE layer the
    maximum expert load divided by the mean.

    Args:
      metrics: values on the host.
    """
    losses = {name: float(value) for name, value in metrics.losses._asdict().items()}
    entry: Entry = {"step": step, "losses": losses}
    for name, value in metrics._asdict().items():
        if name == "expert_load":
            load = np.asarray(value)
            means = np.maximum(load.mean(axis=-1), 1e-9)
            entry[name] = (load.max(axis=-1) / means).tolist()
        elif name != "losses":
            entry[name] = float(value)
    return entry


def divergence(entry: Entry) -> str | None:
    """Returns a message about the first loss or norm that is not finite, or None if all are."""
    values = {"gradient_norm": entry.get("gradient_norm", 0.0)}
    for group in ("losses", "held_out"):
        values |= {f"{group}.{name}": value for name, value in entry.get(group, {}).items()}
    for name, value in values.items():
        if not math.isfinite(value):
            return (
                f"step {entry['step']}: {name} is {value}; expected a finite number: "
                "the run has diverged"
            )
    return None
