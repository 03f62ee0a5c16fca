"""The part of ``dsv3 bench`` that measures: sends the requests and prints the results."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import math
from collections.abc import Sequence
from typing import Any

from dsv3_jax.cli.flags import read_api_key
from dsv3_jax.cli.output import log, print_json
from dsv3_jax.cli.progress import StatusLine
from dsv3_jax.client.completions import CompletionClient, RequestRecord, ServedModel
from dsv3_jax.client.workload import Workload, closed_loop, details, load_name, open_loop, results
from dsv3_jax.traces import TRACES, Trace, fixed
from dsv3_jax.words import counted

_COLUMNS = (
    ("completed", "completed", "{:.0f}"),
    ("failed", "failed", "{:.0f}"),
    ("request_throughput", "req/s", "{:.2f}"),
    ("output_throughput", "tokens/s", "{:,.1f}"),
    ("median_ttft_ms", "TTFT p50", "{:,.1f}"),
    ("p99_ttft_ms", "p99", "{:,.1f}"),
    ("median_tpot_ms", "TPOT p50", "{:,.2f}"),
    ("p99_tpot_ms", "p99", "{:,.2f}"),
    ("median_e2el_ms", "E2EL p50", "{:,.1f}"),
)


def run_bench(arguments: argparse.Namespace) -> None:
    """Measures every load of the command, one after the other."""
    measured = asyncio.run(_measure(arguments))
    if arguments.json:
        print_json(measured[0] if len(measured) == 1 else {"results": measured})
    else:
        _print_table(measured)
    if arguments.picture is not None:
        _draw(arguments, measured)


async def _measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    key = read_api_key(arguments.api_key_file)
    async with CompletionClient(arguments.url, key) as client:
        model = await client.served_model()
        # One short request, so that a server that refuses all is not measured.
        record = await client.complete(model.name, [10, 11, 12], 1)
        if record.error:
            raise ValueError(f"a first request failed: {record.error}")
        loads = [(None, concurrency) for concurrency in arguments.concurrency or ()]
        loads = loads or [(rate, None) for rate in arguments.rate or (math.inf,)]
        return [
            await _measure_load(arguments, client, model, number, rate, concurrency)
            for number, (rate, concurrency) in enumerate(loads)
        ]


async def _measure_load(
    arguments: argparse.Namespace,
    client: CompletionClient,
    model: ServedModel,
    number: int,
    rate: float | None,
    concurrency: int | None,
) -> dict[str, Any]:
    trace = _trace(arguments)
    # Every load has other prompts, which no earlier one has left in the server's prefix cache.
    trace = dataclasses.replace(trace, seed=trace.seed + 1000 * arguments.seed + number)
    work = Workload.of(
        trace,
        arguments.num_requests,
        scale=arguments.scale,
        max_len=model.max_len,
        vocab_size=arguments.vocab_size,
    )
    if work.shortened and arguments.input_len is not None:
        raise ValueError(
            f"--input-len, --output-len: expected at most {model.max_len:,} tokens together, the"
            f" limit of {model.name}, got {arguments.input_len:,} and {arguments.output_len:,}"
        )
    if work.shortened:
        log(
            f"{counted(work.shortened, 'request')} of {len(work.prompts):,} are shortened to the"
            f" model's {model.max_len:,} tokens; --scale makes all shorter"
        )
    name = load_name(rate, concurrency)
    with StatusLine(f"measuring {name}") as status:
        done = 0

        async def send(i: int) -> RequestRecord:
            nonlocal done
            record = await client.complete(model.name, work.prompts[i], work.output_tokens[i])
            done += 1
            status.show(f"{done:,} of {counted(len(work.prompts), 'request')}")
            return record

        if concurrency is not None:
            records = await closed_loop(send, len(work.prompts), concurrency)
        else:
            assert rate is not None
            records = await open_loop(send, work.arrivals(rate))
    _report_failures(records)
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": "openai",
        "model_id": model.name,
        "trace": trace.name,
        "scale": arguments.scale,
        "num_prompts": len(records),
        "shortened": work.shortened,
        "request_rate": "inf" if rate is None or math.isinf(rate) else rate,
        "burstiness": 1.0,
        "max_concurrency": concurrency,
        **results(records),
        **(details(records) if arguments.details else {}),
    }


def _trace(arguments: argparse.Namespace) -> Trace:
    if arguments.input_len is None:
        return TRACES[arguments.trace or "chat"]()
    count = {} if arguments.num_requests is None else {"count": arguments.num_requests}
    return fixed(arguments.input_len, arguments.output_len, **count)


def _report_failures(records: Sequence[RequestRecord]) -> None:
    errors = [record.error for record in records if record.error]
    if len(errors) == len(records):
        raise ValueError(f"expected requests that succeed, got as the first error: {errors[0]}")
    if errors:
        log(f"{counted(len(errors), 'request')} failed; the first error: {errors[0]}")


def _print_table(measured: Sequence[dict[str, Any]]) -> None:
    """Prints a row per load. Latencies are in milliseconds."""
    rows = [["load", *(title for _, title, _ in _COLUMNS)]]
    for result in measured:
        figures = (form.format(result[field]) for field, _, form in _COLUMNS)
        rows.append([_load_name(result), *figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))


def _load_name(result: dict[str, Any]) -> str:
    return load_name(float(result["request_rate"]), result["max_concurrency"])


def _draw(arguments: argparse.Namespace, measured: Sequence[dict[str, Any]]) -> None:
    from dsv3_jax.viz.canvas import save
    from dsv3_jax.viz.serving import LoadPoint, sweep

    fields = [field.name for field in dataclasses.fields(LoadPoint) if field.name != "label"]
    points = [
        LoadPoint(_load_name(result), **{field: result[field] for field in fields})
        for result in measured
    ]
    first = measured[0]
    title = f"{first['model_id']}, {first['trace']} trace, {first['num_prompts']} requests a load"
    save(sweep(points, title), arguments.picture)
