"""``dsv3 bench serve`` on the demo's server."""

from __future__ import annotations

import json

import pytest

from tests.support.command import run


def test_a_sweep(server, tmp_path, capsys):
    picture = tmp_path / "sweep.svg"
    words = ["bench", "serve", "--url", server.url, "--trace", "chat", "--scale", "0.03", "--json"]
    words += ["--num-requests", "5", "--concurrency", "1", "3", "--picture", picture, "--details"]
    server.wait_until_idle()
    before = server.engine.stats()
    assert run(*words) == 0
    server.wait_until_idle()
    generated = server.engine.stats().since(before)
    out, err = capsys.readouterr()
    one, three = json.loads(out)["results"]
    assert [r["max_concurrency"] for r in (one, three)] == [1, 3]
    assert [r["max_concurrent_requests"] for r in (one, three)] == [1, 3]
    for result in (one, three):
        assert (result["model_id"], result["completed"], result["failed"]) == ("demo", 5, 0)
        assert result["total_output_tokens"] == sum(result["output_lens"])
        assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"]
    # The command's first request has one token. No prompt is found in the prefix cache.
    total = one["total_output_tokens"] + three["total_output_tokens"]
    assert generated.output_tokens == total + 1
    assert generated.prefix_hit_tokens == 0
    assert picture.read_text("utf-8").startswith("<?xml")
    assert err == ""


def test_the_table(server, capsys):
    words = ["bench", "serve", "--url", server.url, "--rate", "50", "--num-requests", "3"]
    assert run(*words, "--scale", "0.05", "--trace", "prefixed") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["load", "completed", "failed"]
    assert row.startswith("50 per second")
    assert row.split()[3:5] == ["3", "0"]


def test_fixed_lengths(server, capsys):
    words = ["bench", "serve", "--url", server.url, "--num-requests", "3", "--concurrency", "2"]
    assert run(*words, "--input-len", "7", "--output-len", "4", "--json", "--details") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["trace"], result["input_lens"], result["output_lens"]) == (
        "fixed",
        [7] * 3,
        [4] * 3,
    )


def test_fixed_lengths_beyond_the_models_are_refused(server, capsys):
    """They would not be those that were asked for. A trace is shortened, and a line reports it."""
    words = ["bench", "serve", "--url", server.url, "--num-requests", "1"]
    assert run(*words, "--input-len", "250", "--output-len", "7") == 2
    err = capsys.readouterr().err
    assert "--input-len, --output-len: expected at most 256 tokens together, the limit of" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input-len", "7"], "--input-len, --output-len: expected both or neither"),
        (["--output-len", "0"], "--output-len: expected an integer of at least 1, got 0"),
        (
            ["--input-len", "7", "--output-len", "4", "--trace", "chat"],
            "--trace: expected no trace with --input-len, got chat",
        ),
    ],
)
def test_lengths_that_are_refused(words, message, capsys):
    assert run("bench", "serve", *words) == 2
    assert message in capsys.readouterr().err


def test_too_many_at_a_time(server, capsys):
    """The server refuses what its queue has no room for, and the result says so."""
    words = ["bench", "serve", "--url", server.url, "--num-requests", "8", "--scale", "0.05"]
    with server.limited(2):
        assert run(*words, "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["completed"] + result["failed"] == 8
    assert 1 <= result["failed"] <= 6
    assert result["request_rate"] == "inf"
    assert err.count("\n") == 1
    assert f"{result['failed']} request" in err
    assert "failed; the first error: status 503: queue: expected at most 2" in err
