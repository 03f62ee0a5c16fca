"""The manifest of a store: ``manifest.json``, whose presence marks the store as complete; and the
source's small files that the store keeps.

The manifest records the content of the store and its source. It does not depend on time, machine,
or interruptions of the conversion.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from dsv3_jax.checkpoint import journal
from dsv3_jax.checkpoint.kinds import MANIFEST, describe
from dsv3_jax.checkpoint.reader import NUMPY, FileArray, are_sizes, write_file
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_write, check_file_name, naming
from dsv3_jax.quantization import BlockQuantization, IntegerQuantization, Quantization

NAME = MANIFEST
FORMAT = "dsv3_jax store 1"  # identifier of this version of the store format

FOLDER = "source"  # folder of a store with the small files
HEADERS = "headers"  # folder in it with the headers of the source's safetensors files
UNUSED = "unused.safetensors"  # file in it with the tensors that no model reads

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_MAX_BYTES = 64 * 2**20


class TensorRecord(NamedTuple):
    """A published tensor in the source or in the store."""

    dtype: str  # dtype in the spelling of safetensors
    shape: list[int]  # stored shape, in which packed int4 has half the columns
    hash: str  # XXH3 hash (128 bits) of the bytes in C order
    file: str | None = None  # name of the source's file. None for a tensor of the store.


class SourceFile(NamedTuple):
    """One safetensors file of the source."""

    bytes: int
    header_sha256: str  # SHA-256 of its header, in hexadecimal


class QuantizationLoss(NamedTuple):
    """Error that quantization caused in the tensors of one kind."""

    tensors: int
    relative_rms: float  # sqrt(sum (w - w')^2 / sum w^2)
    largest: float  # max |w - w'|
    largest_weight: float  # max |w|


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of ``manifest.json``. The fields have the names of its keys."""

    tool: str  # name and version of the program that wrote the store
    to: str  # target of the conversion: fp8, bf16, int8 or int4
    config: dict[str, Any]
    dtype: str  # dtype of tensors that are not quantized
    quantization: Quantization | None  # quantization of the store's weights. None for plain floats.
    num_nextn_predict_layers: int  # MTP layers in the files. The source's config may count more.
    files: dict[str, SourceFile]  # the source's safetensors files by name
    kept: dict[str, str]  # words: ok
    """XXH3 hashes of the small files in ``source/``, by path."""
    source: dict[str, TensorRecord]  # the source's tensors by name, in the order of its files
    tensors: dict[str, TensorRecord]  # the store's. Scales of integer weights end in ``_scale``.
    errors: dict[str, QuantizationLoss]  # by tensor kind. Empty if the conversion did not quantize.

    @property
    def model_config(self) -> ModelConfig:
        """Config of the model in the form that the store has."""
        return dataclasses.replace(
            ModelConfig.from_hf(self.config),
            dtype=self.dtype,
            quantization=self.quantization,
            num_nextn_predict_layers=self.num_nextn_predict_layers,
        )


def write(directory: Path, manifest: Manifest) -> None:
    """Writes the manifest of a store atomically."""
    content = {"format": FORMAT, **_as_json(manifest)}
    atomic_write(directory / NAME, _format(content))


def read(directory: Path) -> Manifest:
    """Reads the manifest of a store. Raises ValueError if the store is incomplete, or its manifest
    is damaged or has another format."""
    path = directory / NAME
    if not path.is_file():
        if (directory / journal.NAME).is_file():
            raise ValueError(
                f"{directory}: an unfinished conversion; continue it with dsv3 convert --resume"
            )
        raise ValueError(f"{directory}: expected a store, got {describe(directory)}")
    try:
        content = json.loads(path.read_text("utf-8"))
        version = content.pop("format")
        manifest = _parse(content) if version == FORMAT else None
    except OSError as error:
        raise ValueError(f"{path}: expected a manifest: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise ValueError(f"{path}: damaged: expected a manifest of {FORMAT}") from None
    if manifest is None:
        raise ValueError(f"{path}: expected the format {FORMAT!r}, got {version!r:.100}")
    _check_names(path, manifest)
    return manifest


def _parse(content: dict[str, Any]) -> Manifest:
    content["quantization"] = _parse_quantization(content["quantization"])
    for key, kind in (("files", SourceFile), ("source", TensorRecord), ("tensors", TensorRecord)):
        content[key] = {name: kind(*value) for name, value in content[key].items()}
    content["errors"] = {kind: QuantizationLoss(**loss) for kind, loss in content["errors"].items()}
    manifest = Manifest(**content)
    if not _has_types(manifest):
        raise TypeError
    return manifest


def _check_names(path: Path, manifest: Manifest) -> None:
    """Checks every name that becomes part of a path. A manifest from an untrusted source must not
    refer to files outside the store or outside an export's destination."""
    for name in manifest.files:
        check_file_name(name, f"{path}: files", ".safetensors")
    for name in manifest.kept:
        folder, _, file = name.rpartition("/")
        check_file_name(file if folder == HEADERS else name, f"{path}: kept")
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
    """Returns whether all fields have the right types. Dataclasses do not check them."""
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
        and all(isinstance(n, int | float) for loss in manifest.errors.values() for n in loss)
    )


def _as_json(manifest: Manifest) -> dict[str, Any]:
    content = {f.name: getattr(manifest, f.name) for f in dataclasses.fields(manifest)}
    content["errors"] = {kind: loss._asdict() for kind, loss in manifest.errors.items()}
    if (quantization := manifest.quantization) is not None:
        content["quantization"] = dataclasses.asdict(quantization)
        if not content["quantization"].get("modules_to_not_convert"):
            content["quantization"].pop("modules_to_not_convert", None)
    return content


def _parse_quantization(content: dict[str, Any] | None) -> Quantization | None:
    if content is None:
        return None
    if "bits" in content:
        return IntegerQuantization(**content)
    rows, columns = content.pop("weight_block_size")
    content["modules_to_not_convert"] = tuple(content.get("modules_to_not_convert", ()))
    return BlockQuantization((rows, columns), **content)


def _format(content: dict[str, Any]) -> str:
    """Formats JSON with one line per key, and one line per entry of the long tables."""
    items = []
    for key, value in content.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict) and key != "config" and value:
            entries = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            text = "{\n" + ",\n".join(entries) + "\n }"
        items.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(items) + "\n}\n"


# ---- the source's small files, from which an export reproduces the source ----------------------


def copy_small_files(
    source: Path, tensors: Mapping[str, FileArray], unused: tuple[str, ...], store: Path
) -> None:
    """Writes ``store/source`` anew: config, tokenizer, code, licence, headers, unused tensors."""
    folder = store / FOLDER
    if folder.exists():
        shutil.rmtree(folder)
    (folder / HEADERS).mkdir(parents=True)
    for path in small_files(source):
        if path.name == HEADERS:
            raise ValueError(f"{path}: a store cannot keep a file of this name; rename it first")
        with naming(path):
            content = path.read_bytes()
        atomic_write(folder / path.name, content)
    for file in {id(t.file): t.file for t in tensors.values()}.values():
        atomic_write(folder / HEADERS / file.path.name, file.header)
    if unused:
        with naming(folder / UNUSED):
            write_file(folder / UNUSED, {name: tensors[name][...] for name in unused})


def small_files(directory: Path) -> list[Path]:
    """Returns the small files next to the weights, sorted by name. Symbolic links are followed,
    because the Hub's cache consists of them."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and path.stat().st_size <= _MAX_BYTES
    )


def small_file_hashes(store: Path) -> dict[str, str]:
    """Returns the XXH3 hash (128 bits) of every small file, by its path in ``store/source``. A
    symbolic link counts as missing: a conversion writes none, and it could point out of the
    store."""
    folder = store / FOLDER
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return {
        path.relative_to(folder).as_posix(): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in paths
    }
