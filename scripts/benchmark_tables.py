"""The tables of measured figures in README.md and docs/, made of benchmarks/results/*.json.

    python -m scripts.benchmark_tables

writes each between its marks, ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``. A test fails
when a page and the results differ.
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
)
_TWO_GPUS = (
    "decode_v3_two_gpus_all_gather_h200",
    "decode_v3_two_gpus_all_gather_many_h200",
    "decode_v3_two_gpus_all_to_all_h200",
    "decode_v3_two_gpus_one_sided_h200",
    "decode_v3_two_gpus_micro_batches_h200",
    "decode_v3_two_gpus_prefill_h200",
)
_PREFILL = ("prefill_moonlight_h200", "prefill_v3_h200")


def read(name: str) -> dict[str, Any]:
    """A result: ``date``, ``machine``, ``versions``, ``rows``."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A header that begins with ``>`` is of a column of numbers."""
    rule = ["---:" if name.startswith(">") else "---" for name in header]
    lines = [[name.removeprefix(">") for name in header], rule, *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _timed(names: Iterable[str], phase: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Result and row, of rows of the phase whose drafts are not made up."""
    for name in names:
        for row in read(name)["rows"]:
            if row["phase"] == phase and row.get("acceptance") is None:
                yield name, row


def _share(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def _of_ceiling(result: dict[str, Any], row: dict[str, Any]) -> str:
    """The floor's share, at the bandwidth that is the same for all results."""
    if "floor_fraction" not in row:
        return ""
    return _share(row["floor_fraction"] * result["read_gbs"] / READ_GBS)


def _routed_evenly(row: dict[str, Any]) -> bool:
    """Whether random integer weights sent their rows to about as many experts as chance does: a
    step that reads fewer of them tells nothing of one that reads them all."""
    if row["dtype"] not in ("int8", "int4") or row["batch"] == 1:
        return True
    return row.get("experts_visited", 0.0) >= 0.9 * row.get("experts_expected", 1.0)


def _kernel(row: dict[str, Any]) -> list[object]:
    peer, us = row.get("peer") or "none", row["us"]
    ratio = f"{row['ratio']:.2f}" if row["ratio"] else row.get("no_ratio", "")
    of_peer = ["", ""] if peer == "none" else [f"{row['peer_us']:,.4g}", ratio]
    name = [f"`{row['op']}`", row["dtype"], row["shape"]]
    timed = ["", ""] if us is None else [f"{us:,.4g}", _share(row["roof_fraction"])]
    return [*name, *timed, peer, *of_peer]


_KERNEL = ("operation", "numbers", "shape", ">us", ">of the roof", "best peer", ">its us", ">ratio")


def _kernel_rows() -> list[dict[str, Any]]:
    """One operation and kind of numbers after the other."""
    rows = read("kernels_h200")["rows"]
    kinds = list(dict.fromkeys(map(_kind, sorted(rows, key=lambda row: row["op"]))))
    return sorted(rows, key=lambda row: kinds.index(_kind(row)))


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    return row["op"], row["dtype"]


def kernels() -> str:
    return markdown(_KERNEL, map(_kernel, _kernel_rows()))


def kernels_by_kind() -> str:
    """All shapes of :func:`kernels`, none left out: how their ratios lie."""
    rows = _kernel_rows()
    header = ("operation", "numbers", ">shapes", ">with a ratio", "peers that were best")
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
    """README's table: speed beside a peer, each ratio from one run. All cases count."""
    header = ("what was timed", "compared with", ">cases", ">lowest", ">median", ">highest", "run")
    return markdown(header, [_summary_row(*row) for row in _compared()])


_PURPOSE = {
    "mla_decode": "attention, decode",
    "mla_prefill": "attention, prefill",
    "grouped_matmul": "expert matmuls",
    "grouped_swiglu": "expert gate, up and SwiGLU",
}


def _compared() -> Iterator[tuple[str, str, list[float], str]]:
    """What was timed, what it is compared with, the speedups, and the name of the result."""
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
    header = ("model", "weights", ">rows", ">cached", ">ms a step", ">tokens/s", ">of the floor")
    rows = (
        [r["model"], r["dtype"], r["batch"], f"{r['context']:,}", f"{r['ms']:.2f}",
         f"{r['tokens_per_s']:,.0f}", _of_ceiling(read(name), r), _dated(name)]
        for name, r in _timed(_DECODE, "decode") if _routed_evenly(r)
    )  # fmt: skip
    return markdown([*header, "result"], rows)


def _dated(name: str) -> str:
    return f"[{read(name)['date']}](../benchmarks/results/{name}.json)"


def prefill() -> str:
    header = ("model", "weights", ">prompts", ">tokens of each", ">ms", ">tokens/s", "result")
    rows = (
        [r["model"], r["dtype"], r["batch"], f"{r['context']:,}", f"{r['ms']:.1f}",
         f"{r['tokens_per_s']:,.0f}", _dated(name)]
        for name, r in _timed(_PREFILL, "prefill")
    )  # fmt: skip
    return markdown(header, rows)


def two_gpus() -> str:
    header = ("phase", ">layers", "exchange", ">micro-batches", ">rows", ">tokens", ">ms")
    rows = (
        [phase, r["layers"], r["exchange"], r["micro_batches"], r["batch"], f"{r['context']:,}",
         f"{r['ms']:.2f}", f"{r['tokens_per_s']:,.0f}", _of_ceiling(read(name), r),
         _dated(name)]
        for phase in ("decode", "prefill")
        for name, r in _timed(_TWO_GPUS, phase)
    )  # fmt: skip
    return markdown([*header, ">tokens/s", ">of the floor", "result"], rows)


def all_layers() -> str:
    """The best of each number of rows a device."""
    header = ("phase", ">rows a GPU", ">tokens", ">tokens/s a GPU, slice", ">61 layers")
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for phase in ("decode", "prefill"):
        for _, r in _timed(_TWO_GPUS, phase):
            key = phase, r["batch"] // r["devices"]
            # A slice of as many layers for every row of the table.
            if r["layers"] == 5 and r["ms"] < best.get(key, {"ms": math.inf})["ms"]:
                best[key] = r
    rows = (
        [phase, rows, f"{r['context']:,}", f"{r['tokens_per_s'] / r['devices']:,.0f}",
         f"{tokens_per_s_per_device(r):,.0f}"]
        for (phase, rows), r in sorted(best.items())
    )  # fmt: skip
    return markdown(header, rows)


def speculation() -> str:
    header = ("drafts", ">rows", ">temperature", ">depth", ">tokens/s", ">tokens a step")
    rows = (
        [r["draft"] or "none", r["batch"], f"{r['temperature']:g}", r["depth"],
         f"{r['tokens_per_s']:,.0f}", f"{r['accept_length']:.2f}",
         _share(r["acceptance"][0] if r["acceptance"] else None), f"{r['step_cost']:.2f}",
         f"{r['speed_up']:.2f}"]
        for r in read("speculation_h200")["rows"]
    )  # fmt: skip
    more = (">first draft accepted", ">cost of a step", ">speed-up")
    return markdown([*header, *more], rows)


def quantization() -> str:
    header = ("model", "form", ">KL, nats", ">same best token", ">loss, nats", ">bytes")
    rows = (
        [model, r["form"], f"{r['kl']:.5f}", f"{r['top1_agreement']:.1%}", f"{r['loss']:.4f}",
         f"{r['weight_bytes']:,}"]
        for model, name in (("346 M", "quantization_large"), ("demo", "quantization_demo"))
        for r in read(name)["rows"]
    )  # fmt: skip
    return markdown(header, rows)


def conversion() -> str:
    header = ("command", ">seconds", ">speed of cp -r", ">written, GB", ">peak memory, GB")
    rows = (
        [f"`{r['what']}`" if r["what"] == "cp -r" else f"`dsv3 convert --to {r['what']}`",
         f"{r['seconds']:.1f}", f"{r['ratio_to_cp']:.2f}", f"{r['bytes_written'] / 1e9:.1f}",
         f"{r['peak_bytes'] / 1e9:.2f}"]
        for r in read("convert_cpu")["rows"]
    )  # fmt: skip
    return markdown(header, rows)


def cpu() -> str:
    header = (">rows", ">dsv3_jax, tokens/s", ">transformers, tokens/s", ">ratio")
    rows = (
        [r["batch"], f"{r['dsv3_jax_tokens_per_s']:.0f}", f"{r['transformers_tokens_per_s']:.0f}",
         f"{r['ratio']:.1f}"]
        for r in read("cpu_decode")["rows"]
    )  # fmt: skip
    return markdown(header, rows)


def cold_start() -> str:
    header = (">layers", "compilation cache", ">seconds to the first token", ">of them programs")
    rows = (
        [r["layers"], r["cache"], f"{r['first_token_s']:.1f}", f"{r['phases_s']['programs']:.1f}"]
        for r in read("cold_start_h200")["rows"]
    )
    return markdown(header, rows)


TABLES: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        kernels, kernels_by_kind, decode, prefill, two_gpus, all_layers, speculation, quantization,
        conversion, cpu, cold_start, summary,
    )
}  # fmt: skip


def written(text: str) -> str:
    """A page with its tables as the results have them."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            _, found, after = rest.partition(end)
            if not found:
                raise ValueError(f"expected {end} behind {begin}, got none")
            text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


def main() -> None:
    for page in PAGES:
        atomic_write(page, written(page.read_text("utf-8")))


if __name__ == "__main__":
    main()
