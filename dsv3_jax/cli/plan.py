"""``dsv3 plan``: memory use, limits and lower bounds on time of a deployment, or memory use of
training."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import get_args

from dsv3_jax import presets
from dsv3_jax.checkpoint.find import DEMOS, find_config_directory
from dsv3_jax.cli import plan_report, plan_training, simulation
from dsv3_jax.cli.output import log, print_json
from dsv3_jax.cli.progress import StatusLine
from dsv3_jax.config import ModelConfig
from dsv3_jax.plan.choice import OPEN_SETTINGS, Choice, choose
from dsv3_jax.plan.compiled import CompiledProgram, Phase, compile_program
from dsv3_jax.plan.deployment import Deployment, EngineSettings
from dsv3_jax.plan.engine_state import default_buckets
from dsv3_jax.plan.estimate import DoesNotFitError, Estimate, estimate
from dsv3_jax.plan.search_space import layouts
from dsv3_jax.plan.sweep import sweep
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ShardCache
from dsv3_jax.viz.canvas import check_picture, save
from dsv3_jax.viz.frontier import frontier
from sharding import PRESETS

_DEFAULT_BATCH, _DEFAULT_CONTEXT = 64, 4096  # those of dsv3 serve


def run(arguments: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
      DoesNotFitError: the deployment does not fit; its report has been printed.
      ValueError: a setting is refused.
    """
    if arguments.train:
        plan_training.run(arguments, _config(arguments.model))
        return
    plan_training.check_unused(arguments)
    if arguments.sweep:
        check_picture("--sweep", arguments.sweep)
    simulation.check(arguments)
    try:
        result, choice = _estimate(arguments)
    except DoesNotFitError as error:
        if arguments.json:
            print_json(plan_report.refusal_json(error, arguments.model))
        else:
            print("\n".join(plan_report.refusal(error, arguments.model)))
        raise
    if arguments.trace:
        simulation.run(arguments, result.deployment)
        return
    programs = _compile(result.deployment) if arguments.compile else {}
    points = sweep(result.deployment) if arguments.sweep else []
    if arguments.sweep:
        title = plan_report.title(result.deployment, arguments.model)
        context = result.deployment.context
        save(frontier(points, f"{title}\n{context:,} tokens each"), arguments.sweep)
    if arguments.json:
        print_json(plan_report.as_json(result, arguments.model, choice, programs, points))
        return
    lines = plan_report.table(result, arguments.model, choice)
    if programs:
        lines += ["", *plan_report.compiled_table(result, programs)]
    if points:
        lines += ["", *plan_report.sweep_table(points), "", f"picture: {arguments.sweep}"]
    lines += ["", *plan_report.how_to_run(result, arguments.model)]
    print("\n".join(lines))


def _estimate(arguments: argparse.Namespace) -> tuple[Estimate, Choice | None]:
    """Returns the estimate, and the choice of settings if no layout was given."""
    config, target = _config(arguments.model), Target.parse(arguments.target)
    settings = {name: getattr(arguments, name) for name in OPEN_SETTINGS if name != "layout_name"}
    given = {name: value for name, value in settings.items() if value is not None}
    if given.get("activations") == "bf16":
        given["activations"] = None
    batch, context = _requests(arguments, config, target)
    layout = arguments.layout
    if layout is None:
        layout = layouts(target)[0]
    elif "redundant_experts" not in given:
        given["redundant_experts"] = PRESETS[layout].redundant_experts
    engine = None
    if arguments.serve:
        buckets = default_buckets(target, layout, batch)
        engine = EngineSettings(arguments.cache_tokens, buckets.chunks[-1], buckets.chunk_form)
        given.setdefault("prefill_chunk", buckets.chunk_tokens)
    elif arguments.cache_tokens is not None:
        raise ValueError("--cache-tokens: expected --serve too; a Generator has no such setting")
    deployment = Deployment(
        config=config,
        target=target,
        layout_name=layout,
        batch=batch,
        context=context,
        quantization=arguments.quantization,
        cache_dtype=arguments.cache_dtype,
        mtp=arguments.mtp,
        engine=engine,
        **given,
    )
    shards = ShardCache()
    choice = None
    if arguments.layout is None:
        choice = choose(deployment, {"layout_name", *(settings.keys() - given.keys())}, shards)
        deployment = choice.deployment
    return estimate(deployment, shards), choice


def _requests(
    arguments: argparse.Namespace, config: ModelConfig, target: Target
) -> tuple[int, int]:
    """Returns ``--batch`` and ``--context``, or their defaults."""
    batch, context = arguments.batch, arguments.context
    if batch is None:
        batch = -(-_DEFAULT_BATCH // target.devices) * target.devices
    if context is None:
        # A Generator also needs a position for the next token.
        context = min(_DEFAULT_CONTEXT, config.max_position_embeddings - (not arguments.serve))
    return batch, context


def _compile(deployment: Deployment) -> dict[Phase, CompiledProgram]:
    """Compiles both programs, one after the other, and reports progress on stderr."""
    programs: dict[Phase, CompiledProgram] = {}
    for phase in get_args(Phase):
        log(
            f"compiling {phase} for {deployment.target.name}, all"
            f" {deployment.config.num_hidden_layers} layers"
        )
        with StatusLine(f"compiling {phase}"):
            programs[phase] = compile_program(deployment, phase)
        log(f"{programs[phase].seconds:.0f} s")
    return programs


def _config(name: str) -> ModelConfig:
    if presets.name_of(name) is not None:
        return presets.get(name)
    if name in DEMOS or Path(name).is_dir():
        return ModelConfig.from_hf(find_config_directory(name))
    near = difflib.get_close_matches(name.lower(), presets.PRESETS, n=1)
    raise ValueError(
        f"model: expected demo, a directory or one of {', '.join(presets.PRESETS)}, or their names"
        f" on the Hub, such as deepseek-ai/DeepSeek-V3; got {name!r}"
        + (f"; did you mean {near[0]}?" if near else "")
    )
