"""Checks of a checkpoint's tensors against its config: names, shapes, dtypes and MTP copies."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Container, Iterable
from typing import NamedTuple

from dsv3_jax.checkpoint.arrays import Arrays, digest
from dsv3_jax.checkpoint.reader import SPELLED
from dsv3_jax.checkpoint.tensor_table import (
    STORED_AS,
    UNUSED_SUFFIXES,
    copies,
    quantizable_modules,
    tensor_table,
)
from dsv3_jax.config import ModelConfig
from dsv3_jax.quantization import BlockQuantization
from dsv3_jax.words import first_and_count

_SCALES = ("F32", "BF16", "F8_E8M0")


class TensorProblems(NamedTuple):
    """Disagreements between a checkpoint's tensors and its config."""

    missing: list[str]  # names that the config requires, in the order data flows
    unknown: list[str]  # names in the checkpoint that the config does not have, sorted
    mismatched: list[str]  # one message per tensor with another dtype or shape


def as_stored(config: ModelConfig, arrays: Arrays) -> ModelConfig:
    """Returns the config in the form that the files have.

    It has no MTP layers if the files have none: many tools drop these layers and leave
    ``num_nextn_predict_layers`` unchanged. Its ``modules_to_not_convert`` are exactly those modules
    that config.json lists and that have a plain weight without scale.
    """
    first = f"model.layers.{config.num_hidden_layers}."
    if not any(name.startswith(first) for name in arrays):
        config = dataclasses.replace(config, num_nextn_predict_layers=0)
    quantization = config.quantization
    if not isinstance(quantization, BlockQuantization) or not quantization.modules_to_not_convert:
        return config
    config = without_plain_modules(config)
    listed = {name.strip(".") for name in quantization.modules_to_not_convert}
    # transformers takes the names for regular expressions. The only ones in use are ".*" and "*".
    patterns = {name.replace(".*", "*").replace("[", "[[]") for name in listed if "*" in name}
    plain = [
        module
        for module in quantizable_modules(config)
        if _is_listed(module, listed, patterns)
        and (weight := f"{module}.weight") in arrays
        and SPELLED[arrays[weight].dtype] in STORED_AS.values()
        and weight + quantization.scale_suffix not in arrays
    ]
    quantization = dataclasses.replace(quantization, modules_to_not_convert=tuple(plain))
    return dataclasses.replace(config, quantization=quantization)


def without_plain_modules(config: ModelConfig) -> ModelConfig:
    """Returns the config with an empty ``modules_to_not_convert``."""
    if not isinstance(config.quantization, BlockQuantization):
        return config
    quantization = dataclasses.replace(config.quantization, modules_to_not_convert=())
    return dataclasses.replace(config, quantization=quantization)


def _is_listed(module: str, names: Container[str], patterns: Iterable[str]) -> bool:
    """Returns whether a module has one of ``names``, is inside of such a one, or ends like one; or
    matches one of ``patterns``, in which ``*`` stands for any text."""
    keys = module.split(".")
    return any(
        ".".join(keys[:i]) in names or ".".join(keys[i:]) in names for i in range(len(keys) + 1)
    ) or any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)


def check_tensors(config: ModelConfig, arrays: Arrays) -> None:
    """Raises ValueError about the first tensor that is missing, unknown, or has another shape or
    dtype than ``config`` requires. Reads no values.

    The MTP layers' copies of embedding and head may be absent. Tensors that are not quantized may
    be float32 or ``config.dtype``. Scales may also be powers of two in one byte.
    """
    suffix = scale_suffix(config)
    missing, unknown, mismatched = tensor_problems(config, arrays)
    if missing:
        kind = "scale" if missing[0].endswith(suffix) else "tensor"
        raise ValueError(f"checkpoint: missing {kind} {first_and_count(missing)}")
    if unknown and unknown[0].endswith(suffix) and config.quantization is None:
        weight = unknown[0].removesuffix(suffix)
        form = f", which is {SPELLED[arrays[weight].dtype]}" if weight in arrays else ""
        raise ValueError(
            f"{unknown[0]}: a scale of {weight}{form}; config.json has no quantization_config"
        )
    if unknown and is_uncounted_mtp_tensor(config, arrays, unknown[0]):
        raise ValueError(
            f"checkpoint: unknown tensor {first_and_count(unknown)}: an MTP layer; expected a "
            "config.json whose num_nextn_predict_layers counts it, got 0"
        )
    if unknown:
        raise ValueError(f"checkpoint: unknown tensor {first_and_count(unknown)}")
    if mismatched:
        raise ValueError(mismatched[0])


def tensor_problems(config: ModelConfig, arrays: Arrays) -> TensorProblems:
    """Returns everything that :func:`check_tensors` refuses."""
    table = tensor_table(config)
    suffix = scale_suffix(config)
    may_be_absent = copies(config)
    missing = [name for name in table if name not in arrays and name not in may_be_absent]
    unknown = sorted(n for n in arrays if n not in table and not n.endswith(UNUSED_SUFFIXES))
    mismatched = []
    for name, spec in table.items():
        if name not in arrays:
            continue
        got = SPELLED[arrays[name].dtype]
        if name.endswith(suffix) and config.quantization is not None:
            expected = _SCALES
        elif spec.dtype in STORED_AS.values():
            expected = dict.fromkeys(("F32", STORED_AS[config.dtype]))
        else:
            expected = (spec.dtype,)
        if got not in expected:
            mismatched.append(f"{name}: expected {' or '.join(expected)}, got {got}")
        elif arrays[name].shape != spec.shape:
            mismatched.append(f"{name}: expected shape {spec.shape}, got {arrays[name].shape}")
    return TensorProblems(missing, unknown, mismatched)


def is_uncounted_mtp_tensor(config: ModelConfig, arrays: Arrays, name: str) -> bool:
    """Returns whether a tensor belongs to an MTP layer that the config does not count, and that no
    model reads. An MTP layer differs from other layers by its ``eh_proj``."""
    match = re.match(r"model\.layers\.([0-9]+)\.", name)
    return (
        match is not None
        and config.num_nextn_predict_layers == 0
        and int(match[1]) >= config.num_hidden_layers
        and f"{match[0]}eh_proj.weight" in arrays
    )


def check_copy(arrays: Arrays, copy: str, original: str) -> str:
    """Checks that an MTP layer's copy equals its original. Reads both, and returns their hash."""
    got = digest(arrays[copy])
    if got != digest(arrays[original]):
        raise ValueError(copy_mismatch(copy, original))
    return got


def copy_mismatch(copy: str, original: str) -> str:
    """Returns the message for a copy that differs from its original."""
    return f"{copy}: differs from {original}, which it should repeat"


def scale_suffix(config: ModelConfig) -> str:
    """Returns the suffix that distinguishes a scale's name from its weight's. Without a
    quantization in the config it is DeepSeek's, because some conversions leave the scales
    behind."""
    return (config.quantization or BlockQuantization()).scale_suffix


def tensor_kind(name: str) -> str:
    """Removes layer and expert from a name: ``layers.mlp.experts.gate_proj.weight``."""
    return re.sub(r"\.(\d+)(?=\.)", "", name.removeprefix("model."))
