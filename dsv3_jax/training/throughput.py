"""Floating-point operations of a training step, and model FLOPs utilisation."""

from __future__ import annotations

from dsv3_jax.accounting import active_parameters, flops_per_token
from dsv3_jax.config import ModelConfig

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


def training_flops_per_token(config: ModelConfig, length: int) -> float:
    """Returns ``3 (F + M (2 (P_mtp + D W) + A / L))``: the backward pass takes twice the operations
    of the forward pass.

    F is the number of forward operations per token of the main model in sequences of ``length``
    tokens (:func:`dsv3_jax.accounting.flops_per_token`): 2 per active matrix element, plus
    attention A. Each of the M MTP layers adds its own active parameters P_mtp, the shared head (D
    W), and the attention of one of L layers. Recomputation by ``remat`` is not counted.
    """
    forward = flops_per_token(config, length, "prefill")
    head = config.hidden_size * config.vocab_size
    attention = forward.attention / config.num_hidden_layers
    mtp_layer = 2 * (active_parameters(config).mtp + head) + attention
    return 3 * (forward.total + config.num_nextn_predict_layers * mtp_layer)


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak dense bfloat16 FLOP/s of a device, or None if it is unknown."""
    return next((peak for name, peak in _PEAKS.items() if device_kind.startswith(name)), None)


def utilisation(
    config: ModelConfig, length: int, tokens_per_second: float, device_kind: str, dtype: str
) -> float | None:
    """Returns the model FLOPs utilisation: achieved divided by peak FLOP/s (PaLM, arXiv 2204.02311,
    appendix B). It is None if the peak is unknown or the run does not compute in bfloat16.

    Args:
      tokens_per_second: throughput of one device.
      dtype: dtype of the computation.
    """
    peak = peak_flops(device_kind)
    if peak is None or dtype != "bfloat16":
        return None
    return tokens_per_second * training_flops_per_token(config, length) / peak
