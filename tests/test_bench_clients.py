"""scripts/bench_clients.py: figures of another client, with our names."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from pathlib import Path

import pytest

from scripts import bench_clients

FAKE = """#!{python}
import json, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--artifact-dir") + 1])
assert words[words.index("--osl") + 1] == "5"
figures = {figures}
(folder / "profile_export_aiperf.json").write_text(json.dumps(figures))
sys.exit({status})
"""
NAMES = ("time_to_first_token", "inter_token_latency", "request_latency", "request_throughput")


def fake(folder: Path, answers: int, status: int = 0) -> str:
    """Returns a command that writes aiperf's report without sending anything."""
    figures = {name: {"p50": 50.0, "p99": 99.0, "avg": 7.0} for name in NAMES}
    path = folder / "aiperf"
    figures["request_count"] = {"avg": answers}
    path.write_text(FAKE.format(python=sys.executable, figures=figures, status=status), "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_its_figures_have_our_names(tmp_path):
    got = bench_clients.theirs(fake(tmp_path, 3), "http://127.0.0.1:1", 3, 2, 5)
    assert list(got) == list(bench_clients.FIGURES)
    assert (got["median_ttft_ms"], got["p99_e2el_ms"], got["request_throughput"]) == (50, 99, 7)


@pytest.mark.parametrize(
    ("answers", "status", "message"), [(2, 0, "expected 3 answers, got 2"), (3, 1, "status 1")]
)
def test_a_run_with_failures_has_no_figures(tmp_path, answers, status, message):
    with pytest.raises(RuntimeError, match=message):
        bench_clients.theirs(fake(tmp_path, answers, status), "http://127.0.0.1:1", 3, 2, 5)


def test_without_the_command(capsys):
    assert bench_clients.main(["--aiperf", "no-such-command"]) == 2
    assert capsys.readouterr().err == "--aiperf: expected a command, got 'no-such-command'\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aiperf") is None, reason="needs the command aiperf")
def test_both_clients_on_a_server(tmp_path):
    out = tmp_path / "clients.json"
    words = "--count 8 --concurrency 4 --new-tokens 8 --rounds 1 --step-ms 40"
    assert bench_clients.main([*words.split(), "--out", str(out)]) == 0
    for figures in json.loads(out.read_text("utf-8"))["rounds"].values():
        # A request has eight steps, and waits for at most one that has begun.
        assert figures[0]["median_e2el_ms"] >= 8 * 40
