"""Train a model: from scratch, or on from a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dsv3_jax.checkpoint.find import find_config_directory
from dsv3_jax.checkpoint.load import load
from dsv3_jax.cli import compile_cache, flags, hf_directory, training_flags
from dsv3_jax.cli.output import print_json
from dsv3_jax.cli.stop_request import StopRequest
from dsv3_jax.cli.training_progress import TrainingProgress
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import publish_directory
from dsv3_jax.model import DeepSeekV3, abstract, parameter_count, random_model
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.training import record
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.viz.canvas import check_matplotlib
from sharding import PRESETS, Layout, make_layout
from sharding.distributed import barrier, initialize

MODEL = "model"


def run(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    if arguments.plot:
        check_matplotlib("--plot")
    if arguments.distributed:
        initialize()
    # These bring grain and orbax: seconds that no other command should wait for.
    from dsv3_jax.training import run as runs
    from dsv3_jax.training.batches import check_length
    from dsv3_jax.training.corpus import read_corpus

    out: Path = arguments.out
    recorded = record.read(out) if arguments.resume else {}
    plan = _plan(arguments, recorded)
    settings = _settings(arguments, plan.pop("settings"))
    config = _training_config(arguments, recorded.get("training", {}))
    if arguments.resume:
        record.check_writable(out)
    else:
        record.check_new(out)
    compile_cache.enable(arguments.compile_cache)
    model_config = _model_config(plan, recorded)
    layout = _layout(plan)
    tokenizer = _tokenizer(plan, out, given=arguments.tokenizer is not None)
    # As it is trained, whatever form its source has.
    shapes = abstract(dataclasses.replace(model_config, quantization=None), dtype=jnp.float32)
    if layout is not None:
        shapes.lay_out(layout)
    runs.check(shapes, out, config, settings, resume=arguments.resume)
    corpus = read_corpus(plan["data"], model_config, tokenizer and Tokenizer(tokenizer))
    check_length(corpus.train, settings.length)
    first, alone = jax.process_index() == 0, jax.process_count() == 1
    counts: dict[str, int] = {}
    with TrainingProgress(config.steps, is_shown=first) as progress, StopRequest(alone) as request:
        say = progress.print if first else _nothing

        # Called by the run, so that nothing here keeps the initial weights in memory.
        def make() -> DeepSeekV3:
            model = _model(plan, model_config, settings.seed, layout)
            counts["parameters"] = parameter_count(model)
            counts["mtp_parameters"] = parameter_count(model, mtp=True)
            say(
                f"{counts['parameters']:,} parameters and {counts['mtp_parameters']:,} of MTP; "
                f"{len(corpus.train):,} tokens, {len(corpus.held_out):,} held out; "
                f"{1 if layout is None else layout.mesh.size} x {jax.devices()[0].device_kind}"
            )
            return model

        if (before := recorded.get("training", {}).get("steps", config.steps)) < config.steps:
            say(
                f"extends the run from {before} to {config.steps} steps: from here on its schedules"
                f" are those of {config.steps} steps"
            )
        try:
            trained = runs.train(
                make,
                corpus,
                out,
                config,
                _less(settings, time.perf_counter() - began),
                resume=arguments.resume,
                report=progress.show if first else _nothing,
                stop=request.is_made if alone else None,
                beside={"plan": plan | {"settings": dataclasses.asdict(settings)}},
                tokenizer=tokenizer,
            )
            if request.is_made() and not trained.finished:
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            if first:
                say(_kept(out))
            raise
    _write_model(trained.model, out, plan["to"], tokenizer)
    if not first:
        return
    _say(f"wrote {out / MODEL}")
    if arguments.plot:
        from dsv3_jax.viz.training import draw_run

        _say("drew " + " and ".join(map(str, draw_run(out))))
    if arguments.json:
        last = trained.rows[-1] if trained.rows else {}
        result = {
            "out": str(out),
            "model": str(out / MODEL),
            "finished": trained.finished,
            **counts,
            "total_seconds": round(time.perf_counter() - began, 1),
        }
        print_json(result | last)


def _write_model(model: DeepSeekV3, out: Path, to: hf_directory.To, tokenizer: Path | None) -> None:
    """Writes OUT/model. One that is there, from before the run was resumed, stays until the new one
    is whole."""
    directory, fresh = out / MODEL, out / f".{MODEL}.new"
    first = jax.process_index() == 0
    if first and fresh.exists():
        shutil.rmtree(fresh)
    barrier("no new model")
    hf_directory.write(model, fresh, to, tokenizer)
    if first:
        if directory.exists():
            shutil.rmtree(directory)
        publish_directory(fresh, directory)


def _kept(out: Path) -> str:
    """What an interrupted run leaves, and how to go on."""
    from dsv3_jax.training.run import CHECKPOINTS

    saved = [int(path.name) for path in (out / CHECKPOINTS).glob("*") if path.name.isdecimal()]
    if saved:
        return (
            f"interrupted; the checkpoint of step {max(saved)} is kept; go on with "
            f"dsv3 train --out {shlex.quote(str(out))} --resume"
        )
    return f"interrupted; {out} holds no checkpoint"


def _plan(arguments: argparse.Namespace, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What the run is made of: as given, or as recorded."""
    plan = {"config": None, "source": None, "data": None, "tokenizer": None, "to": "bf16"}
    plan |= {"layout": None, "expert_devices": None}
    plan |= {"settings": {}} | recorded.get("plan", {})
    if arguments.config or arguments.source:
        plan |= {"config": None, "source": None}
    if arguments.layout:
        plan["expert_devices"] = None
    given = {name: getattr(arguments, name) for name in plan if name != "settings"}
    # Paths are kept as absolute ones: a run may be resumed from another directory.
    for name in ("config", "tokenizer", "source"):
        if given[name] is not None and Path(given[name]).exists():
            given[name] = str(Path(given[name]).absolute())
    if given["data"] is not None:
        given["data"] = [str(Path(path).expanduser().absolute()) for path in given["data"]]
    plan |= {name: value for name, value in given.items() if value is not None}
    if plan["config"] is None and plan["source"] is None:
        raise ValueError("expected --config for a new model, or --from for one to train on")
    if plan["data"] is None:
        raise ValueError("expected --data: text files, or an .npz of token ids")
    return plan


def _settings(arguments: argparse.Namespace, recorded: Mapping[str, Any]) -> RunSettings:
    # The time limit is one session's.
    before = flags.recorded(recorded, RunSettings)
    before.pop("max_minutes", None)
    return RunSettings(**(before | flags.given(arguments, RunSettings)))


def _training_config(arguments: argparse.Namespace, recorded: Mapping[str, Any]) -> TrainingConfig:
    values = flags.recorded(recorded, TrainingConfig) | flags.given(arguments, TrainingConfig)
    if "steps" not in values:
        raise ValueError("expected --steps, the length of the whole run")
    values.setdefault("learning_rate", training_flags.LEARNING_RATE)
    values.setdefault("final_learning_rate", values["learning_rate"] / 10)
    values.setdefault("warmup_steps", min(200, values["steps"] // 10))
    return TrainingConfig(**values)


def _less(settings: RunSettings, seconds: float) -> RunSettings:
    """With the time that loading took away from the limit."""
    if settings.max_minutes is None:
        return settings
    left = max(settings.max_minutes - seconds / 60, 1e-3)
    return dataclasses.replace(settings, max_minutes=left)


def _model_config(plan: Mapping[str, Any], recorded: Mapping[str, Any]) -> ModelConfig:
    if plan["config"] is None:
        return ModelConfig.from_hf(find_config_directory(plan["source"]))
    # The file may have gone or changed since the run began; run.json has what it said.
    source = recorded.get("model") if not Path(plan["config"]).exists() else None
    config = ModelConfig.from_hf(source or Path(plan["config"]))
    return dataclasses.replace(config, quantization=None)


def _layout(plan: Mapping[str, Any]) -> Layout | None:
    if plan["layout"] not in (None, *PRESETS):
        raise ValueError(f"--layout: expected one of {', '.join(PRESETS)}; got {plan['layout']!r}")
    if plan["layout"] is not None:
        return make_layout(plan["layout"], expert_devices=plan["expert_devices"])
    if plan["expert_devices"] is not None:
        raise ValueError("--expert-devices: expected --layout train beside it, got no layout")
    return None


def _model(
    plan: Mapping[str, Any], config: ModelConfig, seed: int, layout: Layout | None
) -> DeepSeekV3:
    if plan["source"] is None:
        return random_model(config, seed, layout)
    return load(plan["source"], dtype=jnp.float32, layout=layout)[0]


def _tokenizer(plan: Mapping[str, Any], out: Path, given: bool) -> Path | None:
    """The directory that holds the run's tokenizer, where there is one.

    Args:
      given: the plan's is from this command line. A recorded one may have gone or changed since the
        run began; the run has a copy.
    """
    copied = out / record.TOKENIZER
    if not given and (copied / "tokenizer.json").is_file():
        return copied
    if plan["tokenizer"] is not None:
        path = Path(plan["tokenizer"])
        named = path.name == "tokenizer.json"
        directory = path.parent if named else find_config_directory(plan["tokenizer"])
        if not (directory / "tokenizer.json").is_file():
            raise ValueError(f"--tokenizer: expected a tokenizer.json, found none in {directory}")
        return directory
    model = find_config_directory(plan["source"]) if plan["source"] else Path(plan["config"])
    model = model if model.is_dir() else model.parent
    places = (model, Path(plan["data"][0]).parent)
    return next((place for place in places if (place / "tokenizer.json").is_file()), None)


def _nothing(of: Any) -> None:
    """What all processes but the first have to report."""


def _say(line: str) -> None:
    print(f"dsv3: {line}", file=sys.stderr, flush=True)
