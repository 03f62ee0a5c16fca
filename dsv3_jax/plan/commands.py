"""The commands that run a planned deployment."""

from __future__ import annotations

import json
import shlex

from dsv3_jax import presets
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.quantization import IntegerQuantization


def commands(deployment: Deployment, model: str) -> list[str]:
    """Returns the commands, in their order: a conversion if the planned weights are not those that
    are published, and the server.

    ``dsv3 serve`` runs on one host. On several, the second command is Python for a cluster of Ray
    Serve, whose replica has a process on each.

    Args:
      model: what the user calls it: a name of ours or on the Hub, or a directory.
    """
    source, lines = _source(model), []
    config, planned = deployment.config, deployment.quantization
    published = "bf16" if config.quantization is None else "fp8"
    if isinstance(config.quantization, IntegerQuantization):
        published = f"int{config.quantization.bits}"
    if planned not in ("bf16", published):
        store = f"{source.rstrip('/').rpartition('/')[2].lower()}-{planned}"
        lines.append(shlex.join(["dsv3", "convert", source, store, "--to", planned]))
        source = store
    flags = serve_flags(deployment)
    if deployment.target.hosts > 1:
        return [*lines, _on_ray(deployment, source, flags)]
    words = ["dsv3", "serve", "--model", source]
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    visible = _visible_devices(deployment)
    return [*lines, visible + shlex.join(words)]


def serve_flags(deployment: Deployment) -> dict[str, str | int | bool]:
    """Returns the flags of ``dsv3 serve`` for a deployment, by name with underscores, without the
    model and without defaults."""
    config, planned = deployment.config, deployment.quantization
    flags: dict[str, str | int | bool | None] = {
        "layout": deployment.layout_name if deployment.target.devices > 1 else None,
        "exchange": deployment.exchange if deployment.exchange != "all_gather" else None,
        "float8_dispatch": deployment.float8_dispatch or None,
        "quantization": None if planned == "bf16" else planned,
        "activations": deployment.activations,
        "cache_dtype": deployment.cache_dtype,
        "max_len": min(deployment.max_len, config.max_position_embeddings),
        "max_running": deployment.batch,
        "cache_tokens": deployment.engine and deployment.engine.cache_tokens,
        "draft": "mtp" if deployment.mtp else None,
    }
    return {name: value for name, value in flags.items() if value is not None}


def _source(model: str) -> str:
    """Returns what ``--model`` of the commands that load a model takes."""
    preset = presets.name_of(model)
    if preset is None:
        return model
    names = presets.HUB_NAMES[preset]
    same = [name for name in names if model.lower() in (name.lower(), name.lower().split("/")[1])]
    return (same or names)[0]


def _visible_devices(deployment: Deployment) -> str:
    """Returns the beginning of a command that has fewer GPUs than the host may have, because a
    layout is over all devices."""
    target = deployment.target
    if target.platform != "gpu" or not 1 < target.devices < 8 or target.kind == "gb200":
        return ""
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(target.devices)))} "


def _on_ray(deployment: Deployment, source: str, flags: dict[str, str | int | bool]) -> str:
    target = deployment.target
    device = "num_gpus" if target.platform == "gpu" else "TPU"
    chips = target.devices_of_host
    if target.kind == "tpu7x":
        chips //= 2  # Ray counts chips
    # Strings in double quotes, because the shell's are single ones.
    shown = ", ".join(
        f"{name}={json.dumps(value) if isinstance(value, str) else value}"
        for name, value in flags.items()
    )
    code = (
        "from ray import serve; from dsv3_jax.serve_ray import build_app;"
        f" serve.run(build_app({json.dumps(source)}, serve=dict({shown}),"
        f" resources=dict({device}={chips}), hosts={target.hosts}), blocking=True)"
    )
    return shlex.join(["python", "-c", code])
