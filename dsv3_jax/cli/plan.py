"""Say what a model needs on given devices, what fits, and how fast it could be."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, get_args

from dsv3_jax import presets
from dsv3_jax.checkpoint.load import find_description
from dsv3_jax.config import QUANTIZATIONS, ModelConfig
from dsv3_jax.plan.compiled import Compiled, Phase, compile_program
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.fit import Plan, plan
from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.plan.sweep import Point, sweep
from dsv3_jax.plan.target import Target
from dsv3_jax.viz.canvas import check_matplotlib, save
from dsv3_jax.viz.frontier import frontier
from sharding import PRESETS, Exchange

_MEANINGS = {
    "weights": "weights",
    "cache": "latent cache",
    "state": "tokens, counters",
    "up_projections": "up-projections held to decode",
    "dequantized": "weights dequantized for many rows",
    "tiled": "weights in other tiles",
    "exchange": "exchange of tokens",
    "workspace": "workspace",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = ", ".join(presets.PRESETS)
    add("--model", required=True, help=f"demo, a directory, a store, or one of {names}")
    add("--target", required=True, help="such as gpu:h200x8, tpu:v5p:4x4x8 (chips of a slice)")
    add("--layout", required=True, choices=tuple(PRESETS))
    add("--batch", type=int, required=True, metavar="B", help="rows of all devices")
    add("--context", type=int, required=True, metavar="S", help="tokens of a row")
    add("--quantization", choices=tuple(QUANTIZATIONS), default="bf16", help="default: bf16")
    add("--activations", choices=("float8",), help="with --quantization fp8: see generate")
    add("--exchange", choices=get_args(Exchange), default="all_gather", help="default: all_gather")
    add("--float8-dispatch", action="store_true", help="tokens travel to experts in float8")
    add("--mtp", action="store_true", help="the MTP layer drafts a token a step, and all hold")
    add("--redundant-experts", type=int, default=0, metavar="N", help="replicas beside one of each")
    add(
        "--prefill-chunk",
        type=int,
        default=512,
        metavar="T",
        help="prompt tokens a row at a time (default: 512)",
    )
    add(
        "--compile",
        action="store_true",
        help="compile every layer for the target, which need not be here: the compiler's peaks"
        " beside the formula's, and the kernels in the programs; takes minutes",
    )
    add(
        "--sweep",
        type=Path,
        metavar="PNG",
        help="also tokens/s a device against tokens/s a user over batches: a table, a picture",
    )
    add("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> None:
    fields = ("batch", "context", "quantization", "activations", "exchange", "float8_dispatch")
    fields += ("mtp", "redundant_experts", "prefill_chunk")
    if arguments.sweep:
        check_matplotlib("--sweep")
    found = plan(
        Deployment(
            config=_config(arguments.model),
            target=Target.parse(arguments.target),
            layout_name=arguments.layout,
            **{name: getattr(arguments, name) for name in fields},
        )
    )
    programs = _compile(found.deployment) if arguments.compile else {}
    points = sweep(found.deployment) if arguments.sweep else []
    if arguments.sweep:
        title = f"{_title(found.deployment, arguments.model)}\n{arguments.context} tokens a row"
        save(frontier(points, title), arguments.sweep)
    if arguments.json:
        print(json.dumps(as_json(found, arguments.model, programs, points)))
        return
    lines = _table(found, arguments.model)
    if programs:
        lines += ["", *_compiled_table(found, programs)]
    if points:
        lines += ["", *_sweep_table(points), "", f"picture: {arguments.sweep}"]
    print("\n".join(lines))


def _compile(deployment: Deployment) -> dict[Phase, Compiled]:
    """Both programs, one after the other; says on stderr how it goes."""
    found: dict[Phase, Compiled] = {}
    for phase in get_args(Phase):
        print(
            f"dsv3: compiling {phase} for {deployment.target.name}, all"
            f" {deployment.config.num_hidden_layers} layers",
            file=sys.stderr,
            flush=True,
        )
        found[phase] = compile_program(deployment, phase)
        print(f"dsv3: {found[phase].seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def _config(name: str) -> ModelConfig:
    if name.lower() in presets.PRESETS:
        return presets.get(name)
    if name == "demo" or Path(name).is_dir():
        return ModelConfig.from_hf(find_description(name))
    raise ValueError(
        f"model: expected demo, a directory or one of {', '.join(presets.PRESETS)}; got {name!r}"
    )


def as_json(
    found: Plan, model: str, programs: dict[Phase, Compiled], points: list[Point]
) -> dict[str, Any]:
    """Bytes and seconds, and tokens a second."""
    plan = found.deployment
    return {
        "model": model,
        "target": plan.target.name,
        "devices": plan.target.devices,
        "layout": plan.layout_name,
        **{
            name: getattr(plan, name)
            for name in (
                *("batch", "context", "quantization", "activations", "exchange"),
                *("float8_dispatch", "mtp", "redundant_experts", "prefill_chunk"),
            )
        },
        "memory_bytes": plan.target.chip.memory,
        "peak_bytes": found.peak,
        "bytes": {
            phase: {**dataclasses.asdict(memory), "peak": memory.peak}
            for phase, memory in found.memory.items()
        },
        "largest_batch": found.largest_batch,
        "largest_context": found.largest_context,
        "bounds": {phase: _bound(each) for phase, each in found.rooflines.items()},
        "compiled": {
            phase: dataclasses.asdict(each) | {"peak": each.peak}
            for phase, each in programs.items()
        },
        "sweep": [dataclasses.asdict(point) for point in points],
    }


def _bound(roofline: Roofline) -> dict[str, Any]:
    names = ("seconds", "binding", "tokens_per_s", "tokens_per_s_per_device")
    return dataclasses.asdict(roofline) | {name: getattr(roofline, name) for name in names}


def _table(found: Plan, model: str) -> list[str]:
    plan = found.deployment
    lines = [
        f"{_title(plan, model)}: {plan.batch} rows of {plan.context} tokens",
        "",
        f"{'GB a device':36}{'decode':>12}{'prefill':>12}",
    ]
    decode, prefill = found.memory["decode"], found.memory["prefill"]
    for name, words in _MEANINGS.items():
        a, b = getattr(decode, name), getattr(prefill, name)
        if a or b:
            lines.append(f"  {words:34}{a / 1e9:12.2f}{b / 1e9:12.2f}")
    lines += [
        f"  {'peak':34}{decode.peak / 1e9:12.2f}{prefill.peak / 1e9:12.2f}",
        f"  {'of':34}{plan.target.chip.memory / 1e9:12.2f}",
        "",
        f"largest batch at this context         {found.largest_batch:>22,}",
        f"largest context at this batch         {found.largest_context:>22,}",
        "",
        f"{'ms at the least':36}{'a step':>12}{'a prefill':>12}",
    ]
    step, prompts = found.rooflines["decode"], found.rooflines["prefill"]
    for name, words in (
        ("weights", "reading weights"),
        ("cache", "reading the cache"),
        ("arithmetic", "arithmetic"),
        ("network", "network"),
        ("seconds", "the longest; memory's two added"),
    ):
        a, b = getattr(step, name), getattr(prompts, name)
        lines.append(f"  {words:34}{1e3 * a:12.2f}{1e3 * b:12.2f}")
    lines += [
        f"  {'bound by':34}{step.binding:>12}{prompts.binding:>12}",
        f"  {'tokens/s at most, all devices':34}"
        f"{step.tokens_per_s:12,.0f}{prompts.tokens_per_s:12,.0f}",
        f"  {'tokens/s at most, a device':34}"
        f"{step.tokens_per_s_per_device:12,.0f}{prompts.tokens_per_s_per_device:12,.0f}",
    ]
    return lines


def _title(plan: Deployment, model: str) -> str:
    devices = plan.target.devices
    return (
        f"{model} in {plan.quantization} on {plan.target.name}, {devices}"
        f" {'device' if devices == 1 else 'devices'}, {plan.layout_name}"
    )


def _compiled_table(found: Plan, programs: dict[Phase, Compiled]) -> list[str]:
    compiled = list(programs.values())

    def line(words: str, cells: list[str]) -> str:
        return f"  {words:34}" + "".join(f"{cell:>12}" for cell in cells)

    def gb(nbytes: int) -> str:
        return f"{nbytes / 1e9:.2f}"

    ratios = [found.memory[phase].peak / each.peak for phase, each in programs.items()]
    return [
        f"{'GB a device, says the compiler':36}" + "".join(f"{phase:>12}" for phase in programs),
        line("weights, cache, counters", [gb(each.arguments) for each in compiled]),
        line("everything else", [gb(each.workspace) for each in compiled]),
        line("peak", [gb(each.peak) for each in compiled]),
        line("the formula's peak beside it", [f"{ratio:.1%}" for ratio in ratios]),
        *(
            line(f"{name} kernels", [str(each.kernels.get(name, 0)) for each in compiled])
            for name in sorted({name for each in compiled for name in each.kernels})
        ),
    ]


def _sweep_table(points: list[Point]) -> list[str]:
    lines = [f"{'rows':>8}{'MTP':>6}{'tokens/s a user':>18}{'tokens/s a device':>20}  bound by"]
    for point in points:
        lines.append(
            f"{point.batch:8,}{'yes' if point.mtp else 'no':>6}{point.tokens_per_s_per_user:18,.1f}"
            f"{point.tokens_per_s_per_device:20,.0f}  {point.binding}"
        )
    return lines
