"""``dsv3 train``: trains a model, from scratch or from a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dsv3_jax import compile_cache
from dsv3_jax.checkpoint.find import find_config_directory
from dsv3_jax.checkpoint.load import load, stored_form
from dsv3_jax.checkpoint.open_checkpoint import open_checkpoint
from dsv3_jax.cli import flags, hf_directory
from dsv3_jax.cli.arguments.train import LEARNING_RATE
from dsv3_jax.cli.loading import refused_if_too_large
from dsv3_jax.cli.output import print_json
from dsv3_jax.cli.progress import TrainingProgress
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import publish_directory
from dsv3_jax.generation_config import with_absent_tokens
from dsv3_jax.initialization import abstract_model, parameter_count, random_model
from dsv3_jax.interrupts import StopRequest
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.training import record, trackers
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.viz.canvas import check_matplotlib
from sharding import PRESETS, Layout, make_layout
from sharding.distributed import barrier, initialize

MODEL = "model"
"""Directory of the trained model, in the run's directory."""

_BYTES_PER_WEIGHT = {"bf16": 2, "float32": 4, "fp8": 1 + 4 / 128**2}
"""Size of the trained model, by ``--to``."""
_MESH_SIZES = "expert_devices", "context_devices"
"""Inputs that :func:`sharding.make_layout` takes with the layout train."""

_FLOAT32 = {"dtype": "float32", "quantization": None}
"""Arguments of :func:`load` for the weights of all runs but those of low-rank updates, and of those
that earlier versions began."""


def run(arguments: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
      ValueError: a setting, the data or the run's directory is refused, or a step does not fit.
    """
    began = time.perf_counter()
    if arguments.plot:
        check_matplotlib("--plot")
    if arguments.track:
        with flags.naming("--track"):
            trackers.parse(arguments.track)
    if arguments.distributed:
        initialize()
    # Imported here because they import grain and orbax, which takes seconds.
    from dsv3_jax.training import run as runs
    from dsv3_jax.training.batches import check_length
    from dsv3_jax.training.corpus import read_corpus

    out: Path = arguments.out
    recorded = record.read(out) if arguments.resume else {}
    inputs = _inputs(arguments, recorded)
    settings = _settings(arguments, inputs.pop("settings"))
    config = _training_config(arguments, recorded.get("training", {}))
    if arguments.resume:
        record.check_writable(out)
    else:
        record.check_new(out)
    compile_cache.enable(arguments.compile_cache)
    layout = _layout(inputs)
    tokenizer = _tokenizer(inputs, out, is_given=arguments.tokenizer is not None)
    encoder = tokenizer and Tokenizer(tokenizer)
    model_config = _model_config(inputs, recorded, encoder)
    quantization = None
    if inputs["source"] is not None and config.lora_rank:
        stored = open_checkpoint(inputs["source"]).config
        if not arguments.resume:
            inputs |= _base(stored, inputs["to"], layout)
        quantization = stored.quantization if inputs["quantization"] else None
    shapes = abstract_model(
        dataclasses.replace(model_config, quantization=quantization),
        dtype=jnp.dtype(inputs["dtype"]),
        quantization=quantization,
    )
    if layout is not None:
        shapes.lay_out(layout)
    weights = parameter_count(shapes) + parameter_count(shapes, mtp=True)
    model_bytes = round(weights * _BYTES_PER_WEIGHT[inputs["to"]])
    is_chosen = config.remat == "auto"
    config = runs.check(
        shapes, out, config, settings, resume=arguments.resume, more_bytes=model_bytes
    ).config
    corpus = read_corpus(inputs["data"], model_config, encoder)
    check_length(corpus.train, settings.length)
    is_first, is_alone = jax.process_index() == 0, jax.process_count() == 1
    counts: dict[str, int] = {}
    expected = (
        f"{out}: expected a training step that fits on the devices (--remat, --accumulate, --batch,"
        " --length and --layout change its size)"
    )
    with (
        refused_if_too_large(expected),
        TrainingProgress(config.steps, is_shown=is_first) as progress,
        StopRequest(is_alone) as request,
    ):
        log = progress.print if is_first else _ignore

        # The run calls this, so that no variable here keeps the initial weights in memory.
        def make_model() -> DeepSeekV3:
            model = _model(inputs, model_config, settings.seed, layout)
            counts["parameters"] = parameter_count(model)
            counts["mtp_parameters"] = parameter_count(model, mtp=True)
            log(
                f"{counts['parameters']:,} parameters and {counts['mtp_parameters']:,} of MTP; "
                f"{len(corpus.train):,} tokens, {len(corpus.held_out):,} held out; "
                f"{1 if layout is None else layout.mesh.size} x {jax.devices()[0].device_kind}"
            )
            return model

        if is_chosen and config.recomputed != "none":
            log(f"--remat {config.remat}: with less recomputation a step does not fit the memory")
        if (before := recorded.get("training", {}).get("steps", config.steps)) < config.steps:
            log(
                f"extends the run from {before} to {config.steps} steps; its schedules are now"
                f" those of {config.steps} steps"
            )
        tracker = None
        if arguments.track and is_first:
            shown = dataclasses.asdict(config) | dataclasses.asdict(settings)
            tracker = trackers.make_tracker(arguments.track, out, shown)
        try:
            trained = runs.train(
                make_model,
                corpus,
                out,
                config,
                # The memory has been checked above.
                _reduce_time_limit(
                    dataclasses.replace(settings, check_memory=False),
                    time.perf_counter() - began,
                ),
                resume=arguments.resume,
                report=progress.show if is_first else _ignore,
                tracker=tracker,
                should_stop=(lambda: request.is_made) if is_alone else None,
                metadata={"plan": inputs | {"settings": dataclasses.asdict(settings)}},
                tokenizer=tokenizer,
            )
            if request.is_made and not trained.finished:
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            if is_first:
                log(_interrupt_message(out))
            raise
    _write_model(trained.model, out, inputs["to"], tokenizer)
    if not is_first:
        return
    log(f"wrote {out / MODEL}")
    if arguments.plot:
        from dsv3_jax.viz.training import draw_run

        log("drew " + " and ".join(map(str, draw_run(out))))
    if arguments.json:
        last = trained.metrics[-1] if trained.metrics else {}
        result = {
            "out": str(out),
            "model": str(out / MODEL),
            "finished": trained.finished,
            **counts,
            "total_seconds": round(time.perf_counter() - began, 1),
        }
        print_json(result | last)


def _write_model(
    model: DeepSeekV3,
    out: Path,
    weight_format: hf_directory.WeightFormat,
    tokenizer: Path | None,
) -> None:
    """Writes OUT/model. The model of an earlier session stays until the new one is complete."""
    directory, unfinished = out / MODEL, out / f".{MODEL}.new"
    is_first = jax.process_index() == 0
    if is_first and unfinished.exists():
        shutil.rmtree(unfinished)
    barrier("no new model")
    hf_directory.write(model, unfinished, weight_format, tokenizer)
    if is_first:
        if directory.exists():
            shutil.rmtree(directory)
        publish_directory(unfinished, directory)


def _interrupt_message(out: Path) -> str:
    """Returns which checkpoint an interrupted run has kept, and the command that resumes it."""
    # Imported here because it imports orbax, which takes seconds.
    from dsv3_jax.training.checkpoints import recorded_steps

    if saved := recorded_steps(out / record.CHECKPOINTS):
        return (
            f"interrupted; the checkpoint of step {saved[-1]} is kept; resume with "
            f"dsv3 train --out {shlex.quote(str(out))} --resume"
        )
    return f"interrupted; {out} has no checkpoint"


def _inputs(arguments: argparse.Namespace, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the run's inputs by flag, from the command line or else from run.json.

    ``"settings"`` has the recorded fields of RunSettings.
    """
    inputs = {"config": None, "source": None, "data": None, "tokenizer": None, "to": "bf16"}
    inputs |= {"layout": None} | dict.fromkeys(_MESH_SIZES) | _FLOAT32
    inputs |= {"settings": {}}
    for name in recorded.get("plan", {}):
        if name not in inputs:
            raise ValueError(
                f"run.json: plan.{name}: expected an input of this version; resume with the version"
                " that wrote it"
            )
    inputs |= recorded.get("plan", {})
    if arguments.config or arguments.source:
        inputs |= {"config": None, "source": None}
    if arguments.layout:
        inputs |= dict.fromkeys(_MESH_SIZES)
    given = {name: getattr(arguments, name) for name in inputs.keys() - {"settings", *_FLOAT32}}
    # Paths are recorded as absolute ones: a run may be resumed from another directory.
    for name in ("config", "tokenizer", "source"):
        if given[name] is not None and Path(given[name]).exists():
            given[name] = str(Path(given[name]).absolute())
    if given["data"] is not None:
        given["data"] = [str(Path(path).expanduser().absolute()) for path in given["data"]]
    inputs |= {name: value for name, value in given.items() if value is not None}
    if inputs["config"] is None and inputs["source"] is None:
        raise ValueError("expected --config for a new model, or --from to train an existing one")
    if inputs["data"] is None:
        raise ValueError("expected --data with text files, or with an .npz of token ids")
    return inputs


def _base(stored: ModelConfig, to: str, layout: Layout | None) -> dict[str, str | None]:
    """Returns ``dtype`` and ``quantization`` with which :func:`load` keeps weights that low-rank
    updates freeze as they are stored, or in float32 if the trained model is to be float32. FSDP
    cannot shard quantised weights, and a model has one form of all: such are dequantised."""
    quantization = stored_form(stored)
    is_partly_plain = getattr(stored.quantization, "modules_to_not_convert", ())
    if is_partly_plain or (layout is not None and layout.fsdp_axes):
        quantization = None
    dtype = "float32" if to == "float32" else stored.dtype
    return {"dtype": dtype, "quantization": quantization}


def _settings(arguments: argparse.Namespace, recorded: Mapping[str, Any]) -> RunSettings:
    before = flags.recorded_values(recorded, RunSettings)
    # The time limit holds for one session only.
    before.pop("max_minutes", None)
    return RunSettings(**(before | flags.given_values(arguments, RunSettings)))


def _training_config(arguments: argparse.Namespace, recorded: Mapping[str, Any]) -> TrainingConfig:
    values = flags.recorded_values(recorded, TrainingConfig) | flags.given_values(
        arguments, TrainingConfig
    )
    if "steps" not in values:
        raise ValueError("expected --steps with the length of the whole run, got none")
    values.setdefault("learning_rate", LEARNING_RATE)
    values.setdefault("final_learning_rate", values["learning_rate"] / 10)
    values.setdefault("warmup_steps", min(200, values["steps"] // 10))
    return TrainingConfig(**values)


def _reduce_time_limit(settings: RunSettings, seconds: float) -> RunSettings:
    """Subtracts the seconds that the command has already taken from the time limit."""
    if settings.max_minutes is None:
        return settings
    remaining = max(settings.max_minutes - seconds / 60, 1e-3)
    return dataclasses.replace(settings, max_minutes=remaining)


def _model_config(
    inputs: Mapping[str, Any], recorded: Mapping[str, Any], tokenizer: Tokenizer | None
) -> ModelConfig:
    if inputs["config"] is None:
        directory = find_config_directory(inputs["source"])
        config = ModelConfig.from_hf(directory)
        return with_absent_tokens(config, directory, tokenizer)
    # If the file is gone, run.json has its content.
    path = Path(inputs["config"])
    config = ModelConfig.from_hf((recorded.get("model") if not path.exists() else None) or path)
    directory = path if path.is_dir() else path.parent
    config = with_absent_tokens(config, directory, tokenizer)
    return dataclasses.replace(config, quantization=None)


def _layout(inputs: Mapping[str, Any]) -> Layout | None:
    if inputs["layout"] not in (None, *PRESETS):
        raise ValueError(
            f"--layout: expected one of {', '.join(PRESETS)}; got {inputs['layout']!r}"
        )
    if inputs["layout"] is not None:
        return make_layout(inputs["layout"], **{name: inputs[name] for name in _MESH_SIZES})
    for name in _MESH_SIZES:
        if inputs[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag}: expected --layout train with it, got no layout")
    return None


def _model(
    inputs: Mapping[str, Any], config: ModelConfig, seed: int, layout: Layout | None
) -> DeepSeekV3:
    if inputs["source"] is None:
        return random_model(config, seed, layout)
    form: Any = {name: inputs[name] for name in _FLOAT32}
    return load(inputs["source"], layout=layout, **form)[0]


def _tokenizer(inputs: Mapping[str, Any], out: Path, is_given: bool) -> Path | None:
    """Returns the directory of the run's tokenizer, or None if there is no tokenizer.

    Args:
      is_given: whether ``inputs["tokenizer"]`` is from this command line. Otherwise the run's own
        copy comes first, because a recorded path may have changed since the run began.
    """
    copied = out / record.TOKENIZER
    if not is_given and (copied / "tokenizer.json").is_file():
        return copied
    if inputs["tokenizer"] is not None:
        path = Path(inputs["tokenizer"])
        is_file = path.name == "tokenizer.json"
        directory = path.parent if is_file else find_config_directory(inputs["tokenizer"])
        if not (directory / "tokenizer.json").is_file():
            raise ValueError(f"--tokenizer: expected a tokenizer.json, found none in {directory}")
        return directory
    model = find_config_directory(inputs["source"]) if inputs["source"] else Path(inputs["config"])
    model = model if model.is_dir() else model.parent
    candidates = (model, Path(inputs["data"][0]).parent)
    return next((path for path in candidates if (path / "tokenizer.json").is_file()), None)


def _ignore(message: Any) -> None:
    """Replaces the output of every process but the first."""
