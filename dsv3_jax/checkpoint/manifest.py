"""What a store holds and where it came from: ``manifest.json``, whose presence marks it complete.

Nothing in it depends on when, where or in how many goes a checkpoint was converted.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from dsv3_jax.checkpoint.failures import naming
from dsv3_jax.config import BlockQuantization, IntegerQuantization, ModelConfig, Quantization

NAME = "manifest.json"
FORMAT = "dsv3_jax store 1"


class Tensor(NamedTuple):
    """A published tensor: as a source's file had it, or as the store has it."""

    dtype: str
    shape: list[int]
    hash: str
    """XXH3 (128 bits) of the bytes in C order."""
    file: str | None = None
    """Of the source; the store's own are placed by their names."""


class SourceFile(NamedTuple):
    """One safetensors file of the source."""

    bytes: int
    header_sha256: str


class Error(NamedTuple):
    """What quantization did to the tensors of one kind."""

    tensors: int
    relative_rms: float
    """sqrt(sum (w - w')^2 / sum w^2)"""
    largest: float
    """max |w - w'|"""
    largest_weight: float
    """max |w|"""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All of ``manifest.json``."""

    tool: str
    """Name and version of what wrote the store."""
    to: str
    """The target that was asked for: fp8, bf16, int8 or int4."""
    config: dict[str, Any]
    """The source's config.json."""
    dtype: str
    """Of tensors that are not quantized."""
    quantization: Quantization | None
    num_nextn_predict_layers: int
    """MTP layers that the files had, which may be fewer than the config promises."""
    files: dict[str, SourceFile]
    kept: dict[str, str]
    """XXH3 of the small files that are kept in ``source/``."""
    source: dict[str, Tensor]
    """The source's tensors by published name, in the order of its files."""
    tensors: dict[str, Tensor]
    """The store's tensors by published name; the scales of integers end in ``_scale``."""
    errors: dict[str, Error]
    """By tensor kind, where converting quantized."""

    @property
    def model_config(self) -> ModelConfig:
        """The model in the form that the store holds."""
        return dataclasses.replace(
            ModelConfig.from_hf(self.config),
            dtype=self.dtype,
            quantization=self.quantization,
            num_nextn_predict_layers=self.num_nextn_predict_layers,
        )


def write(directory: Path, manifest: Manifest) -> None:
    """Appears whole or not at all, and survives a power cut."""
    content = {"format": FORMAT, **_as_json(manifest)}
    partial = directory / (NAME + ".partial")
    with naming(partial), partial.open("w", encoding="utf-8") as file:
        file.write(_lines(content))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(directory / NAME)
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def read(directory: Path) -> Manifest:
    """
    Raises:
      ValueError: no manifest, or not one that this version writes.
    """
    path = directory / NAME
    try:
        content = json.loads(path.read_text("utf-8"))
        found = content.pop("format")
        if found != FORMAT:
            raise ValueError(f"{path}: expected the format {FORMAT!r}, got {found!r:.100}")
        content["quantization"] = _quantization(content["quantization"])
        for key, kind in (("files", SourceFile), ("source", Tensor), ("tensors", Tensor)):
            content[key] = {name: kind(*value) for name, value in content[key].items()}
        content["errors"] = {k: Error(**v) for k, v in content["errors"].items()}
        return Manifest(**content)
    except OSError as error:
        raise ValueError(f"{path}: expected a manifest: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path}: damaged: expected a manifest of {FORMAT}") from None


def _as_json(manifest: Manifest) -> dict[str, Any]:
    content = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)}
    content["errors"] = {kind: error._asdict() for kind, error in manifest.errors.items()}
    if (quantization := manifest.quantization) is not None:
        content["quantization"] = dataclasses.asdict(quantization)
    return content


def _quantization(content: dict[str, Any] | None) -> Quantization | None:
    if content is None:
        return None
    if "bits" in content:
        return IntegerQuantization(**content)
    rows, columns = content.pop("weight_block_size")
    return BlockQuantization((rows, columns), **content)


def _lines(content: dict[str, Any]) -> str:
    """JSON with a line for every key, and for every entry of the long tables."""
    parts = []
    for key, value in content.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict) and key != "config" and value:
            entries = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            text = "{\n" + ",\n".join(entries) + "\n }"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
