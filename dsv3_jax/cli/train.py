"""Train a model: from scratch, or on from a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dsv3_jax.checkpoint.load import find_description, load
from dsv3_jax.cli import compile_cache, flags, hf_directory, training_flags
from dsv3_jax.cli.layouts import add_layout
from dsv3_jax.cli.progress import Progress
from dsv3_jax.config import ModelConfig
from dsv3_jax.model import DeepSeekV3, parameter_count, random_model
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.training import record
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.viz.canvas import check_matplotlib
from sharding import PRESETS, Layout, make_layout
from sharding.distributed import initialize, wait_for_all

MODEL = "model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--config", metavar="JSON", help="config.json of a model to begin at random"
    )
    source.add_argument(
        "--from", dest="source", metavar="MODEL", help="demo, a directory, a store, or a Hub name"
    )
    add(
        "--data",
        nargs="+",
        metavar="PATH",
        help="an .npz or .npy of token ids; or text files, patterns, directories",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json or its directory (default: the model's, or the one beside --data)",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="a new directory for the run")
    add("--resume", action="store_true", help="go on with the run in --out; it knows its settings")
    add_layout(parser, default="the first device")
    add("--expert-devices", type=int, metavar="N", help="of --layout train (default: all devices)")
    add("--to", choices=["bf16", "fp8", "float32"], help="type of OUT/model (default: bf16)")
    add("--plot", action="store_true", help="draw OUT/loss.png and OUT/expert_load.png")
    add("--json", action="store_true", help="one JSON object on stdout at the end")
    add("--compile-cache", type=Path, metavar="DIR", help="default: ~/.cache/dsv3_jax/xla")
    flags.add_fields(parser, "run", RunSettings, training_flags.RUN, {})
    flags.add_fields(
        parser, "training", TrainingConfig, training_flags.TRAINING, training_flags.DEFAULTS
    )


def run(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    if arguments.plot:
        check_matplotlib("--plot")
    if arguments.distributed:
        initialize()
    # These bring grain and orbax: seconds that no other command should wait for.
    from dsv3_jax.training.corpus import read_corpus
    from dsv3_jax.training.run import train

    recorded = record.read(arguments.out) if arguments.resume else {}
    plan = _plan(arguments, recorded)
    settings = _settings(arguments, plan.pop("settings"))
    config = _training_config(arguments, recorded.get("training", {}))
    compile_cache.enable(arguments.compile_cache)
    model_config = _model_config(plan, recorded)
    layout = _layout(plan)
    tokenizer = _tokenizer(plan, arguments.out)
    corpus = read_corpus(plan["data"], model_config, tokenizer and Tokenizer(tokenizer))
    model = _model(plan, model_config, settings.seed, layout)
    first = jax.process_index() == 0
    with Progress(config.steps) as progress:
        say = progress.say if first else _nothing
        say(
            f"{parameter_count(model):,} parameters and {parameter_count(model, mtp=True):,} of "
            f"MTP; {len(corpus.train):,} tokens, {len(corpus.held_out):,} held out; "
            f"{1 if layout is None else layout.mesh.size} x {jax.devices()[0].device_kind}"
        )
        trained = train(
            model,
            corpus,
            arguments.out,
            config,
            _less(settings, time.perf_counter() - began),
            resume=arguments.resume,
            report=progress.row if first else _nothing,
            beside={"plan": plan | {"settings": dataclasses.asdict(settings)}},
            tokenizer=tokenizer,
        )
    directory = arguments.out / MODEL
    if directory.exists() and first:  # as this run was when it was stopped before
        shutil.rmtree(directory)
    wait_for_all("no model")
    hf_directory.write(trained.model, directory, plan["to"], tokenizer)
    if not first:
        return
    _say(f"wrote {directory}")
    if arguments.plot:
        from dsv3_jax.viz.training import draw_run

        _say("drew " + " and ".join(map(str, draw_run(arguments.out))))
    if arguments.json:
        last = trained.rows[-1] if trained.rows else {}
        result = {
            "out": str(arguments.out),
            "model": str(directory),
            "finished": trained.finished,
            "parameters": parameter_count(model),
            "mtp_parameters": parameter_count(model, mtp=True),
            "total_seconds": round(time.perf_counter() - began, 1),
        }
        print(json.dumps(result | last))


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
    recorded = {name: value for name, value in recorded.items() if name != "max_minutes"}
    return RunSettings(**(recorded | flags.given(arguments, RunSettings)))


def _training_config(arguments: argparse.Namespace, recorded: Mapping[str, Any]) -> TrainingConfig:
    values = flags.with_tuples(recorded) | flags.given(arguments, TrainingConfig)
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
        return ModelConfig.from_hf(find_description(plan["source"]))
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


def _tokenizer(plan: Mapping[str, Any], out: Path) -> Path | None:
    """The directory that holds the run's tokenizer, where there is one."""
    if plan["tokenizer"] is not None:
        path = Path(plan["tokenizer"])
        named = path.name == "tokenizer.json"
        directory = path.parent if named else find_description(plan["tokenizer"])
        if not (directory / "tokenizer.json").is_file():
            raise ValueError(f"--tokenizer: expected a tokenizer.json, found none in {directory}")
        return directory
    model = find_description(plan["source"]) if plan["source"] else Path(plan["config"])
    model = model if model.is_dir() else model.parent
    places = (out / record.TOKENIZER, model, Path(plan["data"][0]).parent)
    return next((place for place in places if (place / "tokenizer.json").is_file()), None)


def _nothing(of: Any) -> None:
    """What all processes but the first have to report."""


def _say(line: str) -> None:
    print(f"dsv3: {line}", file=sys.stderr, flush=True)
