"""Whether a checkpoint has the tensors of its config: every name, shape and dtype, and no other."""

from __future__ import annotations

import dataclasses
import re

from dsv3_jax.checkpoint.arrays import Arrays
from dsv3_jax.checkpoint.safetensors_file import SPELLED
from dsv3_jax.checkpoint.tensor_table import STORED_AS, UNUSED_SUFFIXES, copies, tensor_table
from dsv3_jax.config import ModelConfig
from dsv3_jax.quantization import BlockQuantization

_SCALES = ("F32", "BF16", "F8_E8M0")


def with_layers_present(config: ModelConfig, arrays: Arrays) -> ModelConfig:
    """The config without MTP layers that the files do not have.

    Many tools drop them and leave ``num_nextn_predict_layers`` as it was.
    """
    first = f"model.layers.{config.num_hidden_layers}."
    if any(name.startswith(first) for name in arrays):
        return config
    return dataclasses.replace(config, num_nextn_predict_layers=0)


def check_tensors(config: ModelConfig, arrays: Arrays) -> None:
    """Refuses a checkpoint that is not what ``config`` describes; reads no values.

    The copies of embedding and head that MTP layers carry may be absent. Tensors that are not
    quantized may be float32 or ``config.dtype``, scales also powers of two in one byte.

    Raises:
      ValueError: one line with the name of the first tensor that is missing, unknown, or of another
        shape or dtype.
    """
    suffix = (config.quantization or BlockQuantization()).scale_suffix
    missing, unknown, wrong = differences(config, arrays)
    if missing:
        kind = "scale" if missing[0].endswith(suffix) else "tensor"
        raise ValueError(_listed(f"missing {kind}", missing))
    if unknown and unknown[0].endswith(suffix) and config.quantization is None:
        raise ValueError(
            f"{unknown[0]}: a scale, and config.json has no quantization_config to say of what kind"
        )
    if unknown and is_left_out(config, arrays, unknown[0]):
        raise ValueError(
            f"{_listed('unknown tensor', unknown)}: an MTP layer; expected a config.json whose "
            "num_nextn_predict_layers counts it, got 0"
        )
    if unknown:
        raise ValueError(_listed("unknown tensor", unknown))
    if wrong:
        raise ValueError(wrong[0])


def differences(config: ModelConfig, arrays: Arrays) -> tuple[list[str], list[str], list[str]]:
    """All that :func:`check_tensors` refuses: names that are missing, names that are unknown, and
    a line for each other dtype or shape."""
    table = tensor_table(config)
    suffix = (config.quantization or BlockQuantization()).scale_suffix
    may_be_absent = copies(config)
    missing = [name for name in table if name not in arrays and name not in may_be_absent]
    unknown = sorted(n for n in arrays if n not in table and not n.endswith(UNUSED_SUFFIXES))
    wrong = []
    for name, spec in table.items():
        if name not in arrays:
            continue
        got = SPELLED[arrays[name].dtype]
        if name.endswith(suffix) and config.quantization is not None:
            expected = _SCALES
        elif spec.dtype in STORED_AS.values():
            expected = ("F32", STORED_AS[config.dtype])
        else:
            expected = (spec.dtype,)
        if got not in expected:
            wrong.append(f"{name}: expected {' or '.join(expected)}, got {got}")
        elif arrays[name].shape != spec.shape:
            wrong.append(f"{name}: expected shape {spec.shape}, got {arrays[name].shape}")
    return missing, unknown, wrong


def is_left_out(config: ModelConfig, arrays: Arrays, name: str) -> bool:
    """Whether a tensor is of an MTP layer that the config does not count, and that no model reads
    therefore; eh_proj tells it from a layer of the model."""
    match = re.match(r"model\.layers\.([0-9]+)\.", name)
    return (
        match is not None
        and config.num_nextn_predict_layers == 0
        and int(match[1]) >= config.num_hidden_layers
        and f"{match[0]}eh_proj.weight" in arrays
    )


def tensor_kind(name: str) -> str:
    """A tensor's name without layer and expert: ``layers.mlp.experts.gate_proj.weight``."""
    return re.sub(r"\.(\d+)(?=\.)", "", name.removeprefix("model."))


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"checkpoint: {what} {names[0]}{more}"
