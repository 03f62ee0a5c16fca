"""What a step costs in floating-point operations, and what the device could do meanwhile."""

from __future__ import annotations

from dsv3_jax.accounting import active_parameters, flops_per_token
from dsv3_jax.config import ModelConfig

# Dense bfloat16 operations a second by the beginning of the device's name; longer names first.
# NVIDIA's data sheets of each product (without sparsity); cloud.google.com/tpu/docs for TPUs.
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
    """``3 (F + M (2 (P_mtp + D W) + A / L))``: forward, and twice that for the backward pass.

    F are the forward operations of one token of the main model in windows of ``length``
    (:func:`dsv3_jax.accounting.flops_per_token`: 2 an active matrix element, and attention A);
    each of the M MTP layers adds its own active parameters P_mtp, the shared head (D W), and the
    attention of one layer of L. What rematerialisation computes again is not counted.
    """
    forward = flops_per_token(config, length, "prefill")
    head = config.hidden_size * config.vocab_size
    attention = forward.attention / config.num_hidden_layers
    extra = 2 * (active_parameters(config).mtp + head) + attention
    return 3 * (forward.total + config.num_nextn_predict_layers * extra)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 operations a second of a device; None for one that is not in the table."""
    return next((peak for name, peak in _PEAKS.items() if device_kind.startswith(name)), None)


def utilisation(
    config: ModelConfig, length: int, tokens_per_second: float, device_kind: str, dtype: str
) -> float | None:
    """Model FLOPs utilisation: operations a second over the peak (PaLM, arXiv 2204.02311, app. B).

    None where the peak is not known, or the run computes in another dtype than the peak is for.
    """
    peak = peak_flops(device_kind)
    if peak is None or dtype != "bfloat16":
        return None
    return tokens_per_second * training_flops_per_token(config, length) / peak
