"""The tables of benchmark results: which rows and values they show."""

import pytest

from benchmarks import tables
from benchmarks.machine import read_gbs

H200 = "NVIDIA H200"
ROW = {
    "op": "mla_decode", "dtype": "bf16", "shape": "h1", "us": 10.0, "roof_fraction": 0.5,
    "peer": "FlashMLA", "peer_us": 9.0, "ratio": 0.9,
}  # fmt: skip
ROWS = [
    ROW,
    ROW | {"dtype": "fp8", "us": None, "roof_fraction": None, "ratio": None},
    ROW | {"shape": "h2", "ratio": None, "no_ratio": "spread of ours 28%"},
    ROW | {"shape": "h3", "peer": None, "peer_us": None, "ratio": None},
]


@pytest.fixture
def results(monkeypatch):
    records = {}
    monkeypatch.setattr(tables, "read", records.__getitem__)
    return records


def test_unsteady_times_have_no_ratio(results):
    results["kernels_h200"] = {"rows": ROWS}
    _, _, *lines = tables.kernels().splitlines()
    assert [line.split(" | ", 2)[2] for line in lines] == [
        "h1 | 10 | 50% | FlashMLA | 9 | 0.90 |",
        "h2 | 10 | 50% | FlashMLA | 9 | spread of ours 28% |",
        "h3 | 10 | 50% | none |  |  |",
        "h1 |  |  | FlashMLA | 9 |  |",
    ]
    _, _, *lines = tables.kernels_by_kind().splitlines()
    assert lines == [
        "| `mla_decode` | bf16 | 3 | 1 | FlashMLA | 0.90 | 0.90 | 0.90 |",
        "| `mla_decode` | fp8 | 1 | 0 | FlashMLA |  |  |  |",
    ]


def test_the_last_result_of_a_slice_counts(results, monkeypatch):
    """Errors and cases that only one of the slices has are left out."""
    row = {"phase": "decode", "batch": 1, "context": 4096}
    for name, ms in (("sparse", 4.0), ("sparse_2", 2.0), ("dense", 3.0)):
        rows = [row | {"ms": ms}, {"batch": 8, "context": 4096, "error": "does not fit"}]
        results[name] = {"date": "2026-11-26", "machine": H200, "read_gbs": 4393.0, "rows": rows}
    results["dense"]["rows"].append(row | {"batch": 64, "ms": 9.0})
    monkeypatch.setattr(tables, "_SPARSE", ("sparse", "sparse_2"))
    monkeypatch.setattr(tables, "_DENSE", ("dense",))
    (line,) = tables.sparse_slice().splitlines()[2:]
    assert line.startswith("| 1 | 4,096 | 3.00 | 2.00 | 1.50 |")
    assert "results/sparse_2.json" in line


def test_decode_shows_the_last_result_and_its_fastest_form(results, monkeypatch):
    row = {"phase": "decode", "model": "m", "dtype": "fp8", "batch": 1, "context": 4096}
    row |= {"tokens_per_s": 1.0}
    two = [row | {"ms": 4.0, "feed_forward": "b"}, row | {"ms": 3.0, "feed_forward": "a"}]
    for name, rows in (("first", [row | {"ms": 2.0}]), ("second", two), ("third", two[::-1])):
        results[name] = {"date": name, "machine": H200, "read_gbs": 4393.0, "rows": rows}
    for names in (("first", "second"), ("second", "third")):
        monkeypatch.setattr(tables, "_DECODE", names)
        (line,) = tables.decode().splitlines()[2:]
        assert line.startswith("| m | fp8 | 1 | 4,096 | 3.00 |")
        assert f"results/{names[-1]}.json" in line


def test_decode_shows_no_form_that_no_longer_exists(results, monkeypatch):
    row = {"phase": "decode", "model": "m", "dtype": "fp8", "batch": 1, "context": 4096}
    row |= {"tokens_per_s": 1.0}
    rows = [
        row | {"ms": 3.0, "feed_forward": "mosaic_gpu"},
        row | {"ms": 2.0, "feed_forward": "whole_layer"},
    ]
    results["one"] = {"date": "one", "machine": H200, "read_gbs": 4393.0, "rows": rows}
    monkeypatch.setattr(tables, "_DECODE", ("one",))
    (line,) = tables.decode().splitlines()[2:]
    assert line.startswith("| m | fp8 | 1 | 4,096 | 3.00 |")


def test_shares_use_the_same_peak():
    row = {"floor_fraction": 0.9}
    of_h200 = {"machine": H200, "read_gbs": read_gbs(H200)}
    assert tables.share_of_peak(of_h200, row) == "90%"
    assert tables.share_of_peak(of_h200 | {"read_gbs": of_h200["read_gbs"] / 2}, row) == "45%"
    assert tables.share_of_peak(of_h200, {}) == ""
    assert tables.share_of_peak({"machine": "another", "read_gbs": 1.0}, row) == ""
