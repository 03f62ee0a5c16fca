"""Checks which models can be trained, and with which settings."""

from __future__ import annotations

import jax
from flax import nnx

from dsv3_jax.layers.logical_axes import parameter_shardings
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.settings import RunSettings


def check_trainable(model: DeepSeekV3, config: TrainingConfig) -> None:
    """Checks that the gradient of a model exists and would be correct.

    Args:
      model: abstract weights (shapes only) are enough.

    Raises:
      ValueError: the model has quantised weights and they are trained, float8 activations or an
        expert placement, its exchange has no gradient, or a parameter does not have the sharding
        that the model's layout prescribes.
    """
    weights = nnx.to_flat_state(nnx.state(model, nnx.Param))
    for path, weight in weights:
        if weight.dtype.itemsize == 1 and not config.lora_rank:
            raise ValueError(
                f"expected a model in bfloat16 or float32 to train, got {weight.dtype} in "
                f"{'.'.join(map(str, path))}; load it without quantization, or set lora_rank"
            )
    if any(getattr(m, "float8_activations", False) for _, m in nnx.iter_modules(model)):
        raise ValueError("activations: expected None for training, got float8")
    if any(moe.replicas is not None for moe in model.moe_layers()):
        raise ValueError("placement: expected none for training, got a model with placed experts")
    layout = model.layout
    if layout is None:
        return
    if layout.exchange_axes and model.moe_layers() and layout.exchange != "all_gather":
        raise ValueError(
            "exchange: expected all_gather for training, the only exchange with a gradient; got"
            f" {layout.exchange}"
        )
    shardings = parameter_shardings(model, layout.mesh, layout.rules, fsdp_axes=layout.fsdp_axes)
    for path, weight in weights:
        value = weight.get_value()
        if isinstance(value, jax.ShapeDtypeStruct):  # an abstract model, which is only compiled
            continue
        if not value.sharding.is_equivalent_to(shardings[path], value.ndim):
            raise ValueError(
                f"{'.'.join(map(str, path))}: expected the sharding of the model's layout,"
                f" {shardings[path].spec}, got {value.sharding}; see dsv3_jax.load"
            )


def check_drafts(model: DeepSeekV3, config: TrainingConfig) -> None:
    """Checks that the MTP layer of a model can be trained to draft.

    Raises:
      ValueError: ``draft_depth`` does not fit the model or the other settings.
    """
    if not config.draft_depth:
        return
    mtp_layers = model.config.num_nextn_predict_layers
    for is_valid, expected, got in (
        (mtp_layers == 1, "a model with one MTP layer", f"one with {mtp_layers}"),
        (not config.lora_rank, "lora_rank 0", config.lora_rank),
        (config.indexer_stage == "none", "indexer_stage none", config.indexer_stage),
        (model.layout is None, "a model on one device", "a layout"),
    ):
        if not is_valid:
            raise ValueError(f"draft_depth {config.draft_depth}: expected {expected}, got {got}")


def check_indexers(model: DeepSeekV3, config: TrainingConfig) -> None:
    """Checks that the indexers of a model are trained, and that there are any to train.

    Raises:
      ValueError: ``indexer_stage`` or ``document_mask`` does not fit the model or the other
        settings.
    """
    stage, has_indexer = config.indexer_stage, model.config.has_indexer
    if has_indexer and config.document_mask:
        raise ValueError(
            f"document_mask: expected False for sparse attention, {model.config.model_type}, got"
            " True"
        )
    if stage == "none":
        # Without a loss of their own, only weight decay would change them.
        if has_indexer and not config.lora_rank and not config.draft_depth:
            raise ValueError(
                f"indexer_stage: expected dense or sparse for {model.config.model_type}, got none"
            )
        return
    for is_valid, expected, got in (
        (has_indexer, "a model with indexers", model.config.model_type),
        (not config.lora_rank, "lora_rank 0", config.lora_rank),
        (model.layout is None, "a model on one device", "a layout"),
    ):
        if not is_valid:
            raise ValueError(f"indexer_stage {stage}: expected {expected}, got {got}")


def check_settings(model: DeepSeekV3, config: TrainingConfig, settings: RunSettings) -> None:
    """Checks that batch and length fit the model and its layout.

    Raises:
      ValueError: they do not.
    """
    batch, length = settings.batch, settings.length
    devices = 1 if model.layout is None else model.layout.num_shards("batch")
    if model.layout is None and jax.process_count() > 1:
        raise ValueError(
            f"layout: expected one over the devices of {jax.process_count()} processes, got none"
        )
    if batch % (devices * config.accumulate):
        factors = f"{devices} devices x " if devices > 1 else ""
        raise ValueError(
            f"batch: expected a multiple of {factors}accumulate={config.accumulate}, got {batch}"
        )
    shape = model.config
    shortest = config.mtp_predictions(shape.num_nextn_predict_layers) + 2
    longest = shape.max_position_embeddings
    if not shortest <= length <= longest:
        raise ValueError(f"length: expected {shortest} to {longest} for this model, got {length}")
    if model.layout is not None:
        model.layout.check_length(length)
