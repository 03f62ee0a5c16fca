"""``dsv3 plan --train``: memory of a training step, and settings with which it fits."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from dsv3_jax.cli import flags
from dsv3_jax.cli.allocator import SHARE
from dsv3_jax.cli.output import log, print_json
from dsv3_jax.cli.progress import StatusLine
from dsv3_jax.config import ModelConfig
from dsv3_jax.plan.chips import CUDA
from dsv3_jax.plan.compiled import CompiledProgram, compile_step
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.training import TrainingPlan
from dsv3_jax.quantization import QUANTIZATIONS
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.memory import ACCURACY, LABELS, TrainingMemory
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.words import counted

_DEFAULT_LENGTH = 4096
_FOR_SERVING = (
    *("serve", "cache_tokens", "mtp", "cache_dtype", "activations", "exchange", "float8_dispatch"),
    *("redundant_experts", "prefill_chunk", "sweep", "trace", "prefill_target"),
)


def check_unused(arguments: argparse.Namespace) -> None:
    """Checks that a plan for serving has no flag of training.

    Raises:
      ValueError: it has one.
    """
    given = flags.given_values(arguments, TrainingConfig)
    sizes = "expert_devices", "context_devices"
    names = [name for name in (*given, *sizes) if getattr(arguments, name) is not None]
    if arguments.layout == "train":
        names.append("layout")
    if names:
        flag, value = "--" + names[0].replace("_", "-"), getattr(arguments, names[0])
        flag = flag if value is True else f"{flag} {value}"
        raise ValueError(f"{flag}: expected --train with it")


def run(arguments: argparse.Namespace, config: ModelConfig) -> None:
    """Runs the command.

    Raises:
      ValueError: a setting is refused, or the step does not fit; its table has been printed.
    """
    for name in _FOR_SERVING:
        if getattr(arguments, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')}: expected no --train with it")
    if arguments.quantization != "bf16" and not arguments.lora_rank:
        raise ValueError(
            "--quantization: expected none with --train and no --lora-rank, which trains float32"
            f" weights; got {arguments.quantization}"
        )
    plan = _plan(arguments, config)
    available = available_bytes(plan.target)
    with StatusLine("tracing a step"):
        memory = plan.memory()
    missing, remedy = max(memory.peak - available, 0), None
    if missing:
        with StatusLine("tracing steps that need less"):
            remedy = plan.remedy(available)
    program = None
    if arguments.compile:
        log(f"compiling a step for {plan.target.name}, all {config.num_hidden_layers} layers")
        with StatusLine("compiling"):
            program = compile_step(plan)
    if arguments.json:
        print_json(_json(plan, arguments.model, memory, available, remedy, program))
    else:
        print("\n".join(_table(plan, arguments.model, memory, available, program)))
    if missing:
        raise ValueError(f"a step needs {missing / 1e9:.1f} GB per device too much; {remedy}")


def available_bytes(target: Target) -> int:
    """Returns the bytes of a device that ``dsv3 train`` lets JAX use."""
    memory = target.chip.memory
    if target.platform != "gpu":
        return memory
    return min(memory, int(SHARE * (memory + CUDA)))


def _plan(arguments: argparse.Namespace, config: ModelConfig) -> TrainingPlan:
    target, batch, length = Target.parse(arguments.target), arguments.batch, arguments.context
    if batch is None:
        groups = target.devices // (arguments.context_devices or 1) or 1
        batch = -(-RunSettings.batch // groups) * groups
    if length is None:
        length = min(_DEFAULT_LENGTH, config.max_position_embeddings)
    given: dict[str, Any] = flags.given_values(arguments, TrainingConfig)
    # Steps and learning rates do not change the memory.
    training = TrainingConfig(
        **{"steps": 1, "learning_rate": 1.0, "final_learning_rate": 1.0, "warmup_steps": 0} | given
    )
    return TrainingPlan(
        dataclasses.replace(config, quantization=QUANTIZATIONS[arguments.quantization]),
        target,
        training,
        RunSettings(batch=batch, length=length),
        arguments.layout or ("single" if target.devices == 1 else "train"),
        arguments.expert_devices,
        arguments.context_devices,
    )


def _table(
    plan: TrainingPlan,
    model: str,
    memory: TrainingMemory,
    available: int,
    program: CompiledProgram | None,
) -> list[str]:
    settings, target = plan.settings, plan.target
    lines = [
        f"training of {model} on {target.name}, {counted(target.devices, 'device')},"
        f" {plan.layout_name}: {counted(settings.batch, 'sequence')} of"
        f" {counted(settings.length, 'token')} per step",
        "",
        "GB per device",
    ]

    def line(label: str, value: int) -> str:
        return f"  {label:34}{value / 1e9:12.2f}"

    values = dataclasses.asdict(memory)
    lines += [line(LABELS[name], value) for name, value in values.items() if value]
    lines += [line("peak", memory.peak), line("available", available)]
    if memory.peak <= available:
        remat, accumulate = plan.training.recomputed, plan.training.accumulate
        lines.append(f"  fits with --remat {remat} --accumulate {accumulate}")
    if program is not None:
        lines += [
            "",
            "GB per device, by the compiler",
            line("weights, moments, tokens", program.arguments),
            line("everything else", program.workspace),
            line("peak", program.peak),
            f"  {'estimated peak / compiler peak':34}{memory.peak / program.peak:12.1%}",
        ]
    if 0 < available - memory.peak < ACCURACY * available:
        lines += [
            "",
            f"the estimate is accurate to {ACCURACY:.0%}: --compile tells whether it fits",
        ]
    return lines


def _json(
    plan: TrainingPlan,
    model: str,
    memory: TrainingMemory,
    available: int,
    remedy: str | None,
    program: CompiledProgram | None,
) -> dict[str, Any]:
    return {
        "model": model,
        "target": plan.target.name,
        "devices": plan.target.devices,
        "layout": plan.layout_name,
        "train": True,
        "batch": plan.settings.batch,
        "length": plan.settings.length,
        "bytes": dataclasses.asdict(memory),
        "peak_bytes": memory.peak,
        "memory_bytes": available,
        "fits": memory.peak <= available,
        "what_fits": remedy,
        "compiled": None
        if program is None
        else dataclasses.asdict(program) | {"peak": program.peak},
    }
