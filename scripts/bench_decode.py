"""Measures whole decode steps and prefills of models with published widths and random weights.

    python -m scripts.bench_decode --model moonlight-16b --weights bf16 fp8 int4 \\
        --out benchmarks/results/decode_h200.json [--batches 1 16 64] [--contexts 1024 4096]
        [--prefills 8x2048 1x8192] [--acceptances 0.6 0.7 --depth 1]
        [--layout dp_attention_ep --exchange all_gather one_sided] [--layers 9]
        [--cache-dtype fp8]

The generator's own programs run on a synthetic state: every sequence has the given number of
random tokens in the cache and decodes greedily. The time of a step is the difference between a
long and a short dispatch divided by the difference in steps, as a median over several windows. One
program serves all contexts. Its cache has ``room`` for the longest one, and ``compile_s`` and
``peak_bytes`` belong to that program.

``floor_ms`` is the time to read every needed byte once, at the bandwidth of the GPU if it is known
(:mod:`benchmarks.machine`). The bytes are the weights, including the expected number of distinct
experts if all are equally likely, and the cache; sparse attention reads all index keys and the
latents of the tokens that it selects.

``peak_bytes`` is the sum of weights, cache and ``workspace_bytes``.

With ``--layout`` the model is sharded over all devices by that preset. Batch sizes are then totals,
and bytes and floors are per device. Several exchanges and numbers of micro-batches are measured one
after the other with the same model.

With ``--feed-forward``, decode steps are measured for each of its values, which are those of
``DeepSeekV3.use_feed_forward``: ``mosaic_gpu`` runs everything before attention itself in one
kernel and everything after it in another.

A prefill has forward passes of ``--chunk`` tokens. In expanded form these are one chunk per
sequence, as with ``prefill_chunk`` of a Generator; in absorbed form, an engine's default on Hopper
GPUs, they are chunks of 64 tokens.

With ``--acceptances`` the MTP layer drafts, and the drafts are accepted at that rate whatever the
model computes. A failed measurement records the error and the others continue. The results are
written after every measurement.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks import machine
from benchmarks.decode import floor, models, steps
from dsv3_jax.cli import allocator
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_write
from dsv3_jax.generation.drafters import SyntheticDrafter
from dsv3_jax.layers.paged_cache import Form
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import CacheDtype
from sharding import PRESETS, Exchange, Layout, make_layout

CHUNK = 8192  # prompt tokens of all sequences per prefill chunk


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure decode steps and prefills.")
    parser.add_argument("--model", default="moonlight-16b", help=models.HELP)
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=models.WEIGHTS)
    parser.add_argument(
        "--activations", choices=("float8",), help="dtype of activations in large matmuls"
    )
    parser.add_argument("--cache-dtype", choices=get_args(CacheDtype), help="float8 cache")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64, 128, 256])
    parser.add_argument("--contexts", nargs="*", type=int, default=[1024, 4096])
    parser.add_argument(
        "--prefills",
        nargs="*",
        type=_batch_and_tokens,
        default=[],
        help="BATCHxTOKENS, such as 8x2048",
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=CHUNK,
        help="prompt tokens per chunk, of all sequences together",
    )
    parser.add_argument(
        "--chunk-forms",
        nargs="+",
        choices=get_args(Form),
        default=[None],
        help="forms of attention in prefills, by default an engine's on this device",
    )
    parser.add_argument("--acceptances", nargs="*", type=float, default=[])
    parser.add_argument("--depth", type=int, default=1, help="drafts per step")
    parser.add_argument("--feed-forward", nargs="+", choices=models.FEED_FORWARD, default=[None])
    parser.add_argument("--layers", type=int, help="use only the first N layers")
    parser.add_argument(
        "--layout", choices=tuple(PRESETS), help="sharding preset, over all devices"
    )
    parser.add_argument("--exchange", nargs="+", choices=get_args(Exchange), default=["all_gather"])
    parser.add_argument("--float8-dispatch", action="store_true")
    parser.add_argument(
        "--micro-batches", nargs="+", type=int, default=[1], help="micro-batches per device"
    )
    parser.add_argument("--time-budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def _batch_and_tokens(text: str) -> tuple[int, int]:
    rows, _, tokens = text.partition("x")
    if not (rows.isdecimal() and tokens.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected BATCHxTOKENS such as 8x2048, got {text!r}")
    return int(rows), int(tokens)


class Bench:
    def __init__(self, arguments: argparse.Namespace):
        self._arguments = arguments
        self._layouts: list[Layout | None] = [None]
        if arguments.layout:
            self._layouts = [
                make_layout(
                    arguments.layout,
                    exchange=exchange,
                    float8_dispatch=arguments.float8_dispatch,
                    micro_batches=micro_batches,
                )
                for exchange in arguments.exchange
                for micro_batches in arguments.micro_batches
            ]
        self._end = time.monotonic() + arguments.time_budget
        described = machine.description()
        self._read_gbs = machine.read_gbs(described["machine"])
        self.result: dict[str, Any] = {
            **described,
            "read_gbs": self._read_gbs,
            "rows": [],
        }

    def run(self) -> None:
        config = models.config(self._arguments.model)
        if layers := self._arguments.layers:
            config = dataclasses.replace(config, num_hidden_layers=layers)
        if self._arguments.acceptances and not config.num_nextn_predict_layers:
            raise SystemExit(
                f"--acceptances: expected a model with an MTP layer, got {self._arguments.model}"
            )
        for weights in self._arguments.weights:
            self._all_of(config, weights)

    def _all_of(self, config: ModelConfig, weights: str) -> None:
        arguments = self._arguments
        shapes = models.shapes(config, weights, arguments.dtype, mtp=bool(arguments.acceptances))
        if layout := self._layouts[0]:
            shapes.lay_out(layout)
        model = models.random_model(shapes, layout)
        if arguments.activations:
            model.use_float8_activations()
        if arguments.cache_dtype:
            model.use_cache_dtype(arguments.cache_dtype)
        for layout in self._layouts:
            if layout:  # the shards stay the same
                model.lay_out(layout)
            # Steps without drafts are measured first, in case the time budget does not suffice.
            self._all_decodes(model, weights, [None])
            model.use_feed_forward(None)
            for (rows, tokens), form in itertools.product(
                arguments.prefills, arguments.chunk_forms
            ):
                prefill = functools.partial(self._prefill, model, rows, tokens, form)
                self._row(model, weights, rows, tokens, prefill)
            self._all_decodes(model, weights, arguments.acceptances)
            model.use_feed_forward(None)

    def _all_decodes(
        self, model: DeepSeekV3, weights: str, acceptances: Sequence[float | None]
    ) -> None:
        for rows in self._arguments.batches:
            for implementation in self._arguments.feed_forward:
                model.use_feed_forward(implementation)
                for acceptance in acceptances:
                    self._decodes(model, weights, rows, acceptance)

    def _decodes(
        self, model: DeepSeekV3, weights: str, rows: int, acceptance: float | None
    ) -> None:
        """Measures all contexts with one program, which has room for the longest that fits."""
        drafter_and_depth = (None, 0)
        if acceptance is not None:
            drafter_and_depth = SyntheticDrafter(acceptance), self._arguments.depth
        decode_of_batch: list[steps.Decode] = []

        def measure(cached: int) -> dict[str, Any]:
            if not decode_of_batch:
                decode_of_batch.append(steps.Decode(model, rows, cached, *drafter_and_depth))
            result = {"phase": "decode", "acceptance": acceptance, "depth": drafter_and_depth[1]}
            decode = decode_of_batch[0]
            result |= decode.measure(cached) | _compiled(decode.compiled) | {"room": decode.longest}
            if acceptance is None and self._read_gbs:
                floor_ms = 1e-6 * floor.step_bytes(model, rows, cached) / self._read_gbs
                result |= {"floor_ms": floor_ms, "floor_fraction": floor_ms / result["ms"]}
            return result

        for cached in sorted(self._arguments.contexts, reverse=True):
            self._row(model, weights, rows, cached, functools.partial(measure, cached))

    def _prefill(
        self, model: DeepSeekV3, rows: int, tokens: int, form: Form | None
    ) -> dict[str, Any]:
        chunk = min(tokens, max(1, self._arguments.chunk // rows))
        prefill = steps.Prefill(model, rows, tokens, chunk, form)
        result = {"phase": "prefill", "chunk": chunk, "chunk_form": prefill.chunk_form}
        return result | prefill.measure() | _compiled(prefill.compiled)

    def _row(self, model: DeepSeekV3, weights: str, batch: int, context: int, measure: Any) -> None:
        row = {
            "model": self._arguments.model, "dtype": weights,
            "activations": self._arguments.activations, "batch": batch, "context": context,
        }  # fmt: skip
        if cache_dtype := self._arguments.cache_dtype:
            row |= {"cache_dtype": cache_dtype}
        if implementation := model.feed_forward:
            row |= {"feed_forward": implementation}
        if layout := model.layout:
            row |= {"layers": self._arguments.layers, "layout": self._arguments.layout}
            row |= {"devices": layout.mesh.size, "exchange": layout.exchange}
            row |= {"float8_dispatch": layout.float8_dispatch}
            row |= {"micro_batches": layout.micro_batches}
        if time.monotonic() > self._end:
            row["error"] = "the time budget is spent"
        else:
            try:
                row |= {n: _rounded(value) for n, value in measure().items()}
            except Exception as error:  # the next measurement may fit
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        self.result["rows"].append(row)
        print(json.dumps(row), flush=True)
        if out := self._arguments.out:
            out.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(out, json.dumps(self.result, indent=1) + "\n")


def _compiled(compiled: steps.Compiled) -> dict[str, Any]:
    names = ("compile_s", "peak_bytes", "workspace_bytes")
    return {name: getattr(compiled, name) for name in names}


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    allocator.configure("generate")  # as a command that runs a model
    Bench(parse(sys.argv[1:])).run()


if __name__ == "__main__":
    main()
