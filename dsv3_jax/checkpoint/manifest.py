"""What a store holds and where it came from: ``manifest.json``, whose presence marks it complete.

Nothing in it depends on when, where or in how many goes a checkpoint was converted.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from dsv3_jax.checkpoint import journal, sidecar
from dsv3_jax.checkpoint.kinds import MANIFEST, describe
from dsv3_jax.checkpoint.safetensors_file import NUMPY, are_sizes
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_write, check_file_name
from dsv3_jax.quantization import BlockQuantization, IntegerQuantization, Quantization

NAME = MANIFEST
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
    atomic_write(directory / NAME, _lines(content))


def read(directory: Path) -> Manifest:
    """Reads the manifest of a store.

    Raises:
      ValueError: the store is not whole, or its manifest is not one that this version writes.
    """
    path = directory / NAME
    if not path.is_file():
        if (directory / journal.NAME).is_file():
            raise ValueError(
                f"{directory}: an unfinished conversion; go on with dsv3 convert --resume"
            )
        raise ValueError(f"{directory}: expected a store, got {describe(directory)}")
    try:
        content = json.loads(path.read_text("utf-8"))
        found = content.pop("format")
        manifest = _parsed(content) if found == FORMAT else None
    except OSError as error:
        raise ValueError(f"{path}: expected a manifest: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise ValueError(f"{path}: damaged: expected a manifest of {FORMAT}") from None
    if manifest is None:
        raise ValueError(f"{path}: expected the format {FORMAT!r}, got {found!r:.100}")
    _check_names(path, manifest)
    return manifest


def _parsed(content: dict[str, Any]) -> Manifest:
    content["quantization"] = _quantization(content["quantization"])
    for key, kind in (("files", SourceFile), ("source", Tensor), ("tensors", Tensor)):
        content[key] = {name: kind(*value) for name, value in content[key].items()}
    content["errors"] = {kind: Error(**error) for kind, error in content["errors"].items()}
    manifest = Manifest(**content)
    if not _has_types(manifest):
        raise TypeError
    return manifest


def _check_names(path: Path, manifest: Manifest) -> None:
    """Every name that becomes part of a path is that of a file in one directory: a store from
    elsewhere must not lead out of itself, nor out of where it is exported to."""
    for name in manifest.files:
        check_file_name(name, f"{path}: files", ".safetensors")
    for name in manifest.kept:
        folder, _, file = name.rpartition("/")
        check_file_name(file if folder == sidecar.HEADERS else name, f"{path}: kept")
        if name.startswith("."):
            raise ValueError(f"{path}: kept: expected no hidden file, got {name!r:.200}")
    for name, tensor in manifest.source.items():
        if not isinstance(tensor.file, str) or tensor.file not in manifest.files:
            raise ValueError(
                f"{path}: source: {name}: expected one of files, got {tensor.file!r:.200}"
            )
    for name in manifest.tensors:
        check_file_name(name, f"{path}: tensors")


def _has_types(manifest: Manifest) -> bool:
    """Whether fields that dataclasses and tuples take unseen are of the kinds they should be."""
    tensors = (*manifest.source.values(), *manifest.tensors.values())
    return (
        all(isinstance(text, str) for text in (manifest.tool, manifest.to, manifest.dtype))
        and isinstance(manifest.config, dict)
        and type(manifest.num_nextn_predict_layers) is int
        and all(isinstance(hash, str) for hash in manifest.kept.values())
        and all(are_sizes([f.bytes]) for f in manifest.files.values())
        and all(isinstance(f.header_sha256, str) for f in manifest.files.values())
        and all(t.dtype in NUMPY and are_sizes(t.shape) for t in tensors)
        and all(isinstance(t.hash, str) for t in tensors)
        and all(isinstance(n, int | float) for error in manifest.errors.values() for n in error)
    )


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
