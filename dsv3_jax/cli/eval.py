"""``dsv3 eval``: measures the perplexity of a model on texts."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dsv3_jax import compile_cache
from dsv3_jax.cli.flags import check_weights
from dsv3_jax.cli.loading import directory_of, load_model, make_layout_from, refused_if_too_large
from dsv3_jax.cli.output import json_text, log, print_json
from dsv3_jax.cli.progress import StatusLine
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_write
from dsv3_jax.generation_config import with_absent_tokens
from dsv3_jax.interrupts import report_interrupt
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.training.corpus import read_documents
from dsv3_jax.training.fingerprint import fingerprint
from dsv3_jax.training.perplexity import Evaluator, WindowSettings, encode_texts
from dsv3_jax.words import counted

_SAVE_SECONDS = 10.0
_PRINT_SECONDS = 30.0  # between two lines where stderr is no terminal
_LENGTH = 1024


def run(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    check_weights(arguments)
    if arguments.resume and arguments.out is None:
        raise ValueError("--resume: expected --out with the file to continue, got none")
    if arguments.out is not None and arguments.out.exists() and not arguments.resume:
        raise ValueError(f"--out: {arguments.out} exists; expected a new file, or --resume")
    if arguments.out is not None and not arguments.out.absolute().parent.is_dir():
        raise ValueError(f"--out: {arguments.out}: expected a file in a directory that exists")
    directory = directory_of(arguments.model)
    config = ModelConfig.from_hf(directory)
    settings = _settings(arguments, config)
    described = {"length": settings.length, "stride": settings.stride or settings.length}
    described |= {"batch": settings.batch, "cache": settings.cached}
    tokenizer = Tokenizer(directory)
    config = with_absent_tokens(config, directory, tokenizer)  # as load does
    documents = list(read_documents(arguments.data))
    texts = encode_texts(documents, tokenizer, config.bos_token_id)
    compile_cache.enable(arguments.compile_cache)
    layout = make_layout_from(arguments)
    expected = (
        f"{arguments.model}: expected a model and windows that fit on the devices (--quantization,"
        " --layout, --batch and --length change their size)"
    )
    with refused_if_too_large(expected):
        model, _ = load_model(arguments, arguments.model, layout)
        evaluator = Evaluator(model, texts, settings)
        identity: dict[str, Any] = {}
        if arguments.out is not None:
            identity = described | {
                "cache_dtype": arguments.cache_dtype,
                "activations": arguments.activations,
                "layout": arguments.layout,
                "weights": fingerprint(model),
                "data": _checksum(documents),
            }
        del model
        nats, seconds = _sum(arguments, evaluator, identity)
    result = evaluator.result(nats)
    values = {
        "model": arguments.model,
        "nats_per_token": result.nats_per_token,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "documents": result.documents,
        "bytes": result.num_bytes,
        "tokens": result.tokens,
        **described,
        "seconds": round(seconds, 3),
        "total_seconds": round(time.perf_counter() - began, 1),
    }
    if arguments.json:
        print_json(values)
        return
    print(
        f"{result.nats_per_token:.4f} nats per token, perplexity {result.perplexity:.4f},"
        f" {result.bits_per_byte:.4f} bits per byte: {counted(result.tokens, 'token')} and"
        f" {counted(result.num_bytes, 'byte')} in {counted(result.documents, 'document')}"
    )


def _settings(arguments: argparse.Namespace, config: ModelConfig) -> WindowSettings:
    length = arguments.length
    if length is None:
        length = min(_LENGTH, config.max_position_embeddings)
    try:
        return WindowSettings(length, arguments.stride, arguments.batch, arguments.cache)
    except ValueError as error:
        flag, _, rest = str(error).partition(":")
        raise ValueError(f"--{flag.replace('cached', 'cache')}:{rest}") from None


def _sum(
    arguments: argparse.Namespace, evaluator: Evaluator, identity: dict[str, Any]
) -> tuple[float, float]:
    """Returns the sum of all batches, with those of an earlier command, and the seconds of both."""
    out, total = arguments.out, len(evaluator.batch_tokens)
    sums, before = (0, 0.0), 0.0  # batches and nats, replaced together
    if arguments.resume and out.exists():
        sums, before = _read(out, identity, total)
    ends = list(itertools.accumulate(evaluator.batch_tokens, initial=0))
    began = saved = printed = time.perf_counter()
    first, compiled = sums[0], began

    def save() -> None:
        if out is not None:
            seconds = round(before + time.perf_counter() - began, 3)
            content = {"eval": identity, "batches": sums[0], "nats": sums[1], "seconds": seconds}
            atomic_write(out, json_text(content) + "\n")

    def report() -> str:
        read = f"{sums[0]} of {_batches(total)}"
        if out is None:
            return f"{read} had been read; with --out FILE, --resume continues"
        save()
        return f"{out} has the sums of {read}; --resume continues"

    with report_interrupt("eval", report), StatusLine("evaluating") as status:
        while (done := sums[0]) < total:
            sums = (done + 1, sums[1] + evaluator.nats(done))
            now = time.perf_counter()
            if done == first:
                compiled = now
            line = _progress(ends, *sums, first, now - compiled)
            status.show(line)
            if now - saved > _SAVE_SECONDS:
                save()
                saved = now
            if not sys.stderr.isatty() and now - printed > _PRINT_SECONDS:
                log(line)
                printed = now
    save()
    return sums[1], before + time.perf_counter() - began


def _progress(ends: Sequence[int], done: int, nats: float, first: int, seconds: float) -> str:
    """Returns a line of progress: ``done`` batches have the sum ``nats``, and took N ``seconds``
    since the end of the first one of this command, which includes compilation. ``ends`` has the
    number of tokens in the first 0, 1, 2, ... batches."""
    line = f"{done} of {_batches(len(ends) - 1)}, {nats / ends[done]:.4f} nats per token so far"
    if timed := ends[done] - ends[first + 1]:
        remaining = seconds / timed * (ends[-1] - ends[done])
        unit = f"{remaining / 60:.0f} min" if remaining > 90 else f"{remaining:.0f} s"
        line += f", {unit} to go"
    return line


def _batches(number: int) -> str:
    return f"{number:,} batch" + ("" if number == 1 else "es")


def _read(out: Path, identity: dict[str, Any], total: int) -> tuple[tuple[int, float], float]:
    """Returns batches and nats of an earlier command, and its seconds. Raises ValueError for a file
    of another command, or of other weights, data or settings."""
    try:
        content = json.loads(out.read_text("utf-8"))
        recorded, batches = content["eval"], content["batches"]
        nats, seconds = float(content["nats"]), float(content["seconds"])
        if not (isinstance(recorded, dict) and 0 <= batches <= total and math.isfinite(nats)):
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"--out: {out}: expected a file of dsv3 eval, got another") from None
    for name, value in identity.items():
        if recorded.get(name) != value:
            before = recorded.get(name)
            raise ValueError(
                f"--resume: {name} differs: {out} has sums for {before!r}, got {value!r}"
            )
    return (int(batches), nats), seconds


def _checksum(documents: Iterable[tuple[str, str]]) -> str:
    """Returns the number of documents and a CRC-32 of their texts."""
    crc = count = 0
    for _, text in documents:
        crc, count = zlib.crc32(text.encode() + b"\0", crc), count + 1
    return f"{counted(count, 'document')}, CRC-32 {crc:08x}"
