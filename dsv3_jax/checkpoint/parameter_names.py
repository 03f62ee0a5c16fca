"""Names of the model's parameters in a published checkpoint and in a store.

The same weight has three names. For the routed experts of layer 3, and for the MTP layer
of a model with 61 layers, they are:

* parameter path: ``("layers", 3, "mlp", "experts", "up_proj", "weight")`` and
  ``("mtp", 0, "eh_proj", "weight")``;
* array of a store: ``layers.3.mlp.experts.up_proj.weight``, with all experts stacked, and
  ``mtp.0.eh_proj.weight``;
* published tensors: ``model.layers.3.mlp.experts.{0..255}.up_proj.weight``, one per expert, and
  ``model.layers.61.eh_proj.weight``.

An array is named by its path joined by dots, except that the scale of a weight has the suffix of
the checkpoint. Published names differ in three ways: the prefix ``model.``, which only ``lm_head``
lacks; MTP layers, which continue the numbering of the layers; and the number of the expert.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv3_jax.config import ModelConfig
from dsv3_jax.parameter_path import ParameterPath, dotted
from dsv3_jax.quantization import BlockQuantization, IntegerQuantization

_PREFIX = "model"
_WITHOUT_PREFIX = "lm_head"
_EXPERTS = "experts"

# Name of a weight's scale in the model. Checkpoints may use another suffix.
_MODEL_SCALES = {BlockQuantization: "weight_scale_inv", IntegerQuantization: "weight_scale"}


class TensorNames(NamedTuple):
    """Published tensors that one parameter consists of."""

    names: tuple[str, ...]
    """A single name, or one name per expert in order."""
    stacked: bool
    """Whether the parameter stacks experts along its first axis."""


class StoredLocation(NamedTuple):
    """Location of a published tensor in a store."""

    array: str
    """Name of the array."""
    expert: int | None
    """Index along the first axis of an array that stacks experts. None for other arrays."""


def array_name(config: ModelConfig, path: ParameterPath) -> str:
    """Returns the name of the store's array for the parameter at ``path``."""
    quantization = config.quantization
    if quantization is not None and path[-1] == _MODEL_SCALES[type(quantization)]:
        path = (*path[:-1], "weight" + quantization.scale_suffix)
    return dotted(path)


def published_tensor_names(config: ModelConfig, path: ParameterPath) -> TensorNames:
    """Returns the published names of the parameter at ``path`` in the tree of the model."""
    array = array_name(config, path)
    if _EXPERTS not in array.split("."):
        return TensorNames((published_name(config, StoredLocation(array, None)),), stacked=False)
    locations = (StoredLocation(array, expert) for expert in range(config.n_routed_experts))
    return TensorNames(tuple(published_name(config, each) for each in locations), stacked=True)


def published_name(config: ModelConfig, location: StoredLocation) -> str:
    """Returns the published name of a tensor. Inverse of :func:`stored_location`."""
    keys = location.array.split(".")
    if keys[0] == "mtp":
        keys[:2] = ["layers", str(config.num_hidden_layers + int(keys[1]))]
    if location.expert is not None:
        keys.insert(keys.index(_EXPERTS) + 1, str(location.expert))
    if keys[0] != _WITHOUT_PREFIX:
        keys.insert(0, _PREFIX)
    return ".".join(keys)


def stored_location(config: ModelConfig, name: str) -> StoredLocation:
    """Returns the location of a published tensor. Inverse of :func:`published_name`.

    Raises:
      ValueError, IndexError: no published tensor has such a name.
    """
    keys = name.removeprefix(f"{_PREFIX}.").split(".")
    if keys[0] == "layers" and (layer := int(keys[1])) >= config.num_hidden_layers:
        keys[:2] = ["mtp", str(layer - config.num_hidden_layers)]
    if _EXPERTS not in keys:
        return StoredLocation(".".join(keys), None)
    expert = int(keys.pop(keys.index(_EXPERTS) + 1))
    return StoredLocation(".".join(keys), expert)
