"""README's table: the speedups of all other tables' results."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

from benchmarks.tables import results
from benchmarks.tables.kernels import kernel_rows, kind


def summary() -> str:
    """README's table: speedup over each alternative, each ratio from one run. All cases count."""
    header = ("what was timed", "compared with", ">cases", ">lowest", ">median", ">highest", "run")
    return results.markdown(header, [_summary_row(*row) for row in _compared()])


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
    rows = kernel_rows()
    purposes = list(_PURPOSE)
    for op, dtype in dict.fromkeys(map(kind, sorted(rows, key=lambda r: purposes.index(r["op"])))):
        timed = [row for row in rows if kind(row) == (op, dtype) and row["ratio"]]
        peers = sorted({re.split("[ ,]", row["peer"])[0] for row in timed})
        what = f"{_PURPOSE[op]}, {dtype}"
        yield what, ", ".join(peers), [row["ratio"] for row in timed], "kernels_h200"

    for model, name in (
        ("346 M model", "speculation_one_h100"),
        ("the demo", "speculation_demo_one_h100"),
    ):
        drafted = [r["speed_up"] for r in results.read(name)["rows"] if r["draft"] == "mtp"]
        yield f"decode one sequence with MTP drafts, {model}", "no drafts", drafted, name

    steps = results.read("decode_moonlight_int4_h200")["rows"]
    ms = {(r["dtype"], r["batch"]): r["ms"] for r in steps}
    int4 = [ms["bf16", batch] / ms["int4", batch] for dtype, batch in ms if dtype == "int4"]
    yield "decode with int4 weights, Moonlight-16B", "bf16", int4, "decode_moonlight_int4_h200"

    cpu_ratios = [r["ratio"] for r in results.read("cpu_decode")["rows"]]
    yield "the demo on two CPU cores, float32", "transformers", cpu_ratios, "cpu_decode"

    converted = [
        r["ratio_to_cp"] for r in results.read("convert_cpu")["rows"] if r["what"] != "cp -r"
    ]
    yield "`dsv3 convert` to fp8, bf16, int8, int4", "`cp -r`", converted, "convert_cpu"


def _summary_row(what: str, peer: str, ratios: list[float], name: str) -> list[object]:
    spread = (min(ratios), statistics.median(ratios), max(ratios))
    run = f"[{results.read(name)['date']}](benchmarks/results/{name}.json)"
    return [what, peer, len(ratios), *(f"{ratio:.2f}" for ratio in spread), run]
