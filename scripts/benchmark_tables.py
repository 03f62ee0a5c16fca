"""Writes the benchmark tables of README.md and docs/ from benchmarks/results/*.json.

    python -m scripts.benchmark_tables

writes each table between its marks, ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``. A test
fails if a page does not match the results.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ceiling import READ_GBS
from benchmarks.decode.scaled import tokens_per_s_per_device
from dsv3_jax.files import atomic_write

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = tuple(ROOT / name for name in ("README.md", "docs/benchmarks.md", "docs/speculation.md"))

_DECODE = (
    "decode_moonlight_h200",
    "decode_moonlight_h200_2",
    "decode_moonlight_one_h200",
    "decode_moonlight_fp8_h200",
    "decode_moonlight_int4_h200",
    "decode_v3_h200",
    "decode_v3_h200_2",
    "decode_v3_many_h200",
    "decode_v3_mtp_h200_2",
    "decode_v2_h200",
)
_SPARSE = ("decode_v32_h200", "decode_v32_h200_2")
_DENSE = ("decode_v32_dense_h200", "decode_v32_dense_h200_2")
"""Slices of V3.2. Where results have the same case, the table shows the last one's."""
_TWO_GPUS = (
    "decode_v3_two_gpus_all_gather_h200",
    "decode_v3_two_gpus_all_gather_many_h200",
    "decode_v3_two_gpus_all_to_all_h200",
    "decode_v3_two_gpus_one_sided_h200",
    "decode_v3_two_gpus_micro_batches_h200",
    "decode_v3_two_gpus_prefill_h200",
)
_NEWER_KERNELS = "kernels_first_run_h200", "kernels_second_run_h200", "kernels_third_run_h200"
"""Later results replace earlier ones of the same shape."""

_SPARSE_KERNELS = "kernels_sparse_h100", "kernels_index_weights_h100"

_NOW_DEFAULT = (
    ("", "", "unrolled"),
    ("top_k", "b1 ", "8 programs"),
    ("top_k", "b64 ", "2 programs"),
    ("top_k", "b1024 ", "1 program"),
    ("sparse_mla_decode", "h16 ", "without prefetch"),
    ("sparse_mla_prefill", "", "without prefetch"),
    ("sparse_index", "sq1", "persistent, 1 query, 32 pages"),
    ("sparse_index", "b1 ", "persistent, 4 queries, 1 per iteration"),
    ("sparse_index", "sq4096", "kept weights"),
    ("sparse_index", "sq2048", "kept weights"),
    ("mla_decode", "h16 b", "scored"),
)
"""Operation, part of its shape, and the variant that has become the default since."""

_PREFILL = ("prefill_moonlight_h200", "prefill_v3_h200", "decode_v2_h200")


def read(name: str) -> dict[str, Any]:
    """Reads a result file: ``date``, ``machine``, ``versions``, ``rows``."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Formats a Markdown table. A heading that begins with ``>`` is right-aligned."""
    rule = ["---:" if name.startswith(">") else "---" for name in header]
    lines = [[name.removeprefix(">") for name in header], rule, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _timed(names: Iterable[str], phase: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (result name, row) of a phase, without rows of errors or synthetic drafts."""
    for name in names:
        for row in read(name)["rows"]:
            if row.get("phase") == phase and row.get("acceptance") is None:
                yield name, row


def _share(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def _share_of_peak(result: dict[str, Any], row: dict[str, Any]) -> str:
    """Returns the share of the peak bandwidth, which is the same number for all results."""
    if "floor_fraction" not in row:
        return ""
    return _share(row["floor_fraction"] * result["read_gbs"] / READ_GBS)


def _routed_evenly(row: dict[str, Any]) -> bool:
    """Returns whether random integer weights routed tokens to about as many experts as expected.

    A step that reads fewer experts is not representative.
    """
    if row["dtype"] not in ("int8", "int4") or row["batch"] == 1:
        return True
    return row.get("experts_visited", 0.0) >= 0.9 * row.get("experts_expected", 1.0)


def _kernel(row: dict[str, Any]) -> list[object]:
    peer, us = row.get("peer") or "none", row["us"]
    ratio = f"{row['ratio']:.2f}" if row["ratio"] else row.get("no_ratio", "")
    peer_cells = ["", ""] if peer == "none" else [f"{row['peer_us']:,.4g}", ratio]
    name = [f"`{row['op']}`", row["dtype"], row["shape"]]
    timed = ["", ""] if us is None else [f"{us:,.4g}", _share(row["roof_fraction"])]
    return [*name, *timed, peer, *peer_cells]


_KERNEL = (
    "operation",
    "dtype",
    "shape",
    ">us",
    ">% of roofline",
    "best peer",
    ">peer us",
    ">ratio",
)


def _kernel_rows() -> list[dict[str, Any]]:
    """Returns the rows of the kernel benchmark, grouped by operation and dtype."""
    rows = read("kernels_h200")["rows"]
    kinds = list(dict.fromkeys(map(_kind, sorted(rows, key=lambda row: row["op"]))))
    return sorted(rows, key=lambda row: kinds.index(_kind(row)))


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    return row["op"], row["dtype"]


def kernels() -> str:
    return markdown(_KERNEL, map(_kernel, _kernel_rows()))


def newer_kernels() -> str:
    """Returns the newer kernels with the settings that are the default now."""
    newest = {
        (*_kind(row), row["shape"]): row for name in _NEWER_KERNELS for row in read(name)["rows"]
    }
    rows = [newest[key] for key in sorted(newest)]
    return markdown(_KERNEL, (_kernel(_with_new_default(row)) for row in rows))


def sparse_kernels() -> str:
    """Returns the kernels of sparse attention as they are now."""
    newest = {
        (*_kind(row), row["shape"]): row for name in _SPARSE_KERNELS for row in read(name)["rows"]
    }
    share = _KERNEL.index(">% of roofline")  # of an H200
    timed = (_with_new_default(newest[key]) for key in sorted(newest))
    rows = [_KERNEL, *map(_kernel, timed)]
    header, *cells = ([*row[:share], *row[share + 1 :]] for row in rows)
    return markdown(header, cells)


def _with_new_default(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the time of a variant that has become the default since."""
    for op, shape, name in _NOW_DEFAULT:
        us = row.get("variants", {}).get(name, {}).get("us")
        if us is None or (op and op != row["op"]) or shape not in row["shape"]:
            continue
        share = row["roof_fraction"] and row["roof_fraction"] * row["us"] / us
        return row | {"us": us, "roof_fraction": share, "ratio": row["peer_us"] / us}
    return row


def kernels_by_kind() -> str:
    """Summarises the ratios of all shapes of :func:`kernels`, by operation and dtype."""
    rows = _kernel_rows()
    header = ("operation", "dtype", ">shapes", ">with a ratio", "best peers")
    lines: list[list[object]] = []
    for op, dtype in dict.fromkeys(map(_kind, rows)):
        of_kind = [row for row in rows if _kind(row) == (op, dtype)]
        ratios = sorted(row["ratio"] for row in of_kind if row["ratio"])
        peers = sorted({re.split("[ ,]", row["peer"])[0] for row in of_kind if row.get("peer")})
        spread = [ratios[0], statistics.median(ratios), ratios[-1]] if ratios else []
        cells = [f"{ratio:.2f}" for ratio in spread] or ["", "", ""]
        names = ", ".join(peers) or "none"
        lines.append([f"`{op}`", dtype, len(of_kind), len(ratios), names, *cells])
    return markdown([*header, ">lowest ratio", ">median", ">highest"], lines)


def summary() -> str:
    """README's table: speedup over each alternative, each ratio from one run. All cases count."""
    header = ("what was timed", "compared with", ">cases", ">lowest", ">median", ">highest", "run")
    return markdown(header, [_summary_row(*row) for row in _compared()])


_PURPOSE = {
    "mla_decode": "attention, decode",
    "mla_prefill": "attention, prefill",
    "grouped_matmul": "expert matmuls",
    "grouped_swiglu": "expert gate, up and SwiGLU",
    "sparse_mla_decode": "sparse attention, decode",
    "sparse_mla_prefill": "sparse attention, prefill",
    "sparse_index": "sparse attention, indexer",
    "top_k": "sparse attention, selection",
}


def _compared() -> Iterator[tuple[str, str, list[float], str]]:
    """Yields what was timed, what it is compared with, the speedups, and the result's name."""
    rows = _kernel_rows()
    purposes = list(_PURPOSE)
    for op, dtype in dict.fromkeys(map(_kind, sorted(rows, key=lambda r: purposes.index(r["op"])))):
        timed = [row for row in rows if _kind(row) == (op, dtype) and row["ratio"]]
        peers = sorted({re.split("[ ,]", row["peer"])[0] for row in timed})
        what = f"{_PURPOSE[op]}, {dtype}"
        yield what, ", ".join(peers), [row["ratio"] for row in timed], "kernels_h200"

    drafted = [r["speed_up"] for r in read("speculation_h200")["rows"] if r["draft"] == "mtp"]
    yield "decode with MTP drafts, 346 M model", "no drafts", drafted, "speculation_h200"

    steps = read("decode_moonlight_int4_h200")["rows"]
    ms = {(r["dtype"], r["batch"]): r["ms"] for r in steps}
    int4 = [ms["bf16", batch] / ms["int4", batch] for dtype, batch in ms if dtype == "int4"]
    yield "decode with int4 weights, Moonlight-16B", "bf16", int4, "decode_moonlight_int4_h200"

    cpu_ratios = [r["ratio"] for r in read("cpu_decode")["rows"]]
    yield "the demo on two CPU cores, float32", "transformers", cpu_ratios, "cpu_decode"

    converted = [r["ratio_to_cp"] for r in read("convert_cpu")["rows"] if r["what"] != "cp -r"]
    yield "`dsv3 convert` to fp8, bf16, int8, int4", "`cp -r`", converted, "convert_cpu"


def _summary_row(what: str, peer: str, ratios: list[float], name: str) -> list[object]:
    spread = (min(ratios), statistics.median(ratios), max(ratios))
    run = f"[{read(name)['date']}](benchmarks/results/{name}.json)"
    return [what, peer, len(ratios), *(f"{ratio:.2f}" for ratio in spread), run]


def decode() -> str:
    header = (
        "model",
        "weights",
        ">batch",
        ">context",
        ">ms/step",
        ">tokens/s",
        ">% of peak bandwidth",
    )
    rows = (
        [r["model"], r["dtype"], r["batch"], f"{r['context']:,}", f"{r['ms']:.2f}",
         f"{r['tokens_per_s']:,.0f}", _share_of_peak(read(name), r), _dated_link(name)]
        for name, r in _timed(_DECODE, "decode") if _routed_evenly(r)
    )  # fmt: skip
    return markdown([*header, "result"], rows)


def _dated_link(name: str) -> str:
    return f"[{read(name)['date']}](../benchmarks/results/{name}.json)"


def sparse_slice() -> str:
    """Compares the sparse and the dense slice of V3.2, by number of sequences and cached tokens."""
    sparse, dense = (
        {(r["batch"], r["context"]): (name, r) for name, r in _timed(names, "decode")}
        for names in (_SPARSE, _DENSE)
    )
    header = (
        ">sequences",
        ">cached tokens each",
        ">dense, ms/step",
        ">sparse, ms/step",
        ">speedup",
    )
    more = (">dense, % of peak bandwidth", ">sparse", "results")
    rows = (
        [batch, f"{context:,}", f"{of_dense['ms']:.2f}", f"{of_sparse['ms']:.2f}",
         f"{of_dense['ms'] / of_sparse['ms']:.2f}",
         _share_of_peak(read(dense_name), of_dense), _share_of_peak(read(sparse_name), of_sparse),
         f"{_dated_link(dense_name)}, {_dated_link(sparse_name)}"]
        for batch, context in sorted(sparse.keys() & dense.keys())
        for dense_name, of_dense in [dense[batch, context]]
        for sparse_name, of_sparse in [sparse[batch, context]]
    )  # fmt: skip
    return markdown([*header, *more], rows)


def prefill() -> str:
    header = ("model", "weights", ">prompts", ">tokens each", ">ms", ">tokens/s", "result")
    rows = (
        [r["model"], r["dtype"], r["batch"], f"{r['context']:,}", f"{r['ms']:.1f}",
         f"{r['tokens_per_s']:,.0f}", _dated_link(name)]
        for name, r in _timed(_PREFILL, "prefill")
    )  # fmt: skip
    return markdown(header, rows)


def two_gpus() -> str:
    header = ("phase", ">layers", "exchange", ">micro-batches", ">batch", ">tokens", ">ms")
    rows = (
        [phase, r["layers"], r["exchange"], r["micro_batches"], r["batch"], f"{r['context']:,}",
         f"{r['ms']:.2f}", f"{r['tokens_per_s']:,.0f}", _share_of_peak(read(name), r),
         _dated_link(name)]
        for phase in ("decode", "prefill")
        for name, r in _timed(_TWO_GPUS, phase)
    )  # fmt: skip
    return markdown([*header, ">tokens/s", ">% of peak bandwidth", "result"], rows)


def all_layers() -> str:
    """Takes the fastest setting of each batch size per device."""
    header = ("phase", ">batch per GPU", ">tokens", ">tokens/s per GPU, slice", ">61 layers")
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for phase in ("decode", "prefill"):
        for _, r in _timed(_TWO_GPUS, phase):
            key = phase, r["batch"] // r["devices"]
            # All rows of the table are slices of the same number of layers.
            if r["layers"] == 5 and r["ms"] < best.get(key, {"ms": math.inf})["ms"]:
                best[key] = r
    rows = (
        [phase, rows, f"{r['context']:,}", f"{r['tokens_per_s'] / r['devices']:,.0f}",
         f"{tokens_per_s_per_device(r):,.0f}"]
        for (phase, rows), r in sorted(best.items())
    )  # fmt: skip
    return markdown(header, rows)


def speculation() -> str:
    header = ("drafts", ">batch", ">temperature", ">depth", ">tokens/s", ">tokens per step")
    rows = (
        [r["draft"] or "none", r["batch"], f"{r['temperature']:g}", r["depth"],
         f"{r['tokens_per_s']:,.0f}", f"{r['accept_length']:.2f}",
         _share(r["acceptance"][0] if r["acceptance"] else None), f"{r['step_cost']:.2f}",
         f"{r['speed_up']:.2f}"]
        for r in read("speculation_h200")["rows"]
    )  # fmt: skip
    more = (">first draft accepted", ">relative step cost", ">speedup")
    return markdown([*header, *more], rows)


def quantization() -> str:
    header = ("model", "format", ">KL, nats", ">top-1 agreement", ">loss, nats", ">bytes")
    rows = (
        [model, r["form"], f"{r['kl']:.5f}", f"{r['top1_agreement']:.1%}", f"{r['loss']:.4f}",
         f"{r['weight_bytes']:,}"]
        for model, name in (("346 M", "quantization_large"), ("demo", "quantization_demo"))
        for r in read(name)["rows"]
    )  # fmt: skip
    return markdown(header, rows)


def activations() -> str:
    header = ("format", ">KL, nats", ">top-1 agreement", ">loss, nats")
    rows = (
        [r["form"], f"{r['kl']:.5f}", f"{r['top1_agreement']:.1%}", f"{r['loss']:.4f}"]
        for r in read("activations_demo")["rows"]
    )
    return markdown(header, rows)


def cache_dtype() -> str:
    header = ("cache", ">KL, nats", ">top-1 agreement", ">loss, nats", ">bytes per token")
    rows = (
        [r["form"], f"{r['kl']:.5f}", f"{r['top1_agreement']:.1%}", f"{r['loss']:.4f}",
         f"{r['bytes_per_token']:,}"]
        for r in read("cache_dtype_demo")["rows"]
    )  # fmt: skip
    return markdown(header, rows)


def conversion() -> str:
    header = ("command", ">seconds", ">speed relative to cp -r", ">written, GB", ">peak memory, GB")
    rows = (
        [f"`{r['what']}`" if r["what"] == "cp -r" else f"`dsv3 convert --to {r['what']}`",
         f"{r['seconds']:.1f}", f"{r['ratio_to_cp']:.2f}", f"{r['bytes_written'] / 1e9:.1f}",
         f"{r['peak_bytes'] / 1e9:.2f}"]
        for r in read("convert_cpu")["rows"]
    )  # fmt: skip
    return markdown(header, rows)


def cpu() -> str:
    header = (">batch", ">dsv3_jax, tokens/s", ">transformers, tokens/s", ">ratio")
    rows = (
        [r["batch"], f"{r['dsv3_jax_tokens_per_s']:.0f}", f"{r['transformers_tokens_per_s']:.0f}",
         f"{r['ratio']:.1f}"]
        for r in read("cpu_decode")["rows"]
    )  # fmt: skip
    return markdown(header, rows)


def cold_start() -> str:
    header = (
        ">layers",
        "compilation cache",
        ">seconds to the first token",
        ">of these, compilation",
    )
    rows = (
        [r["layers"], r["cache"], f"{r['first_token_s']:.1f}", f"{r['phases_s']['programs']:.1f}"]
        for r in read("cold_start_h200")["rows"]
    )
    return markdown(header, rows)


TABLES: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        kernels, kernels_by_kind, newer_kernels, sparse_kernels, decode, sparse_slice, prefill,
        two_gpus, all_layers, speculation, quantization, activations, cache_dtype, conversion, cpu,
        cold_start, summary,
    )
}  # fmt: skip


def with_tables(text: str) -> str:
    """Returns a page with its tables replaced by those of the results."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            _, has_end, after = rest.partition(end)
            if not has_end:
                raise ValueError(f"expected {end} after {begin}, got none")
            text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


def main() -> None:
    for page in PAGES:
        atomic_write(page, with_tables(page.read_text("utf-8")))


if __name__ == "__main__":
    main()
