"""A prefill server and the engine of a decode server: the tokens are those of one engine."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.disaggregation.jax_transfer import JaxReceiver
from dsv3_jax.disaggregation.peers import Peers
from dsv3_jax.disaggregation.protocol import PATH, HttpReceiver, HttpSender, PrefillBody
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.engine import Engine, EngineRequest
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.scheduling.step_plan import Phase, ScheduledRequest
from dsv3_jax.generation.request import TokenMask
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.pages import CacheTiers
from dsv3_jax.tokenizer import Tokenizer
from sharding import make_layout
from tests.server.conftest import RunningServer, running
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.shared_programs import shared_programs

pytestmark = pytest.mark.slow

PAGE, MAX_LEN = 8, 120
BUCKETS = Buckets(decodes=(4,), chunks=(1,), chunk_tokens=16, max_steps=1).single()


@pytest.fixture(scope="module", autouse=True)
def _shared_programs() -> Iterator[None]:
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def write_tiny(directory: Path) -> Path:
    """Writes a checkpoint of one layer and an MTP layer."""
    config = tiny_config(num_hidden_layers=1, vocab_size=2048)  # that of the tokenizer
    write_checkpoint(directory, config, random_tensors(config))
    return directory


@pytest.fixture(scope="module")
def model(checkpoint) -> DeepSeekV3:
    return dsv3_jax.load(checkpoint)[0]


def engine(
    model: DeepSeekV3, *, shards: int = 1, draft: str | None = "mtp", **tiers: Any
) -> Engine:
    return Engine(
        model,
        None,
        MAX_LEN,
        max_running=4 * shards,
        cache_tokens=60 * PAGE * shards,
        page_size=PAGE,
        draft=draft,
        buckets=BUCKETS,
        tiers=CacheTiers(**tiers),
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """For what a server needs one for."""
    tokenizer = dsv3_jax.load("demo")[1]
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """Compiled programs, the same on all servers."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def prefill(model, tokenizer, store) -> Iterator[RunningServer]:
    """A prefill server."""
    prefill = engine(model, host_bytes=2**24)
    with running(prefill, tokenizer, sender=HttpSender(), program_store=store) as it:
        yield it


@pytest.fixture(scope="module")
def remote(prefill) -> Iterator[RemotePrefill]:
    source = RemotePrefill(
        Peers([prefill.url]), HttpReceiver(), page_size=PAGE, max_page_bytes=2**20
    )
    yield source
    source.close()


@pytest.fixture(scope="module")
def decode_server(model, tokenizer, remote, store) -> Iterator[RunningServer]:
    """A decode server."""
    decode = engine(model, sources=(remote,), load_seconds=20.0)
    with running(decode, tokenizer, remote=remote, program_store=store) as it:
        yield it


@pytest.fixture(scope="module")
def decode(decode_server) -> Engine:
    """Its engine."""
    return decode_server.engine


@pytest.fixture(autouse=True)
def no_pause(remote, monkeypatch):
    """A server that failed in an earlier test or in this one is tried again at once."""
    monkeypatch.setattr("dsv3_jax.disaggregation.peers._FIRST_PAUSE", 0.0)
    for peer in remote.peers.all:
        peer.failures = 0


def prompts(seed: int) -> list[list[int]]:
    """Returns random prompts. Some begin alike, and some end with a page."""
    rng = random.Random(seed)
    begin = rng.choices(range(2, 60), k=20)
    lengths = (1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 1, *(rng.randint(9, 80) for _ in range(5)))
    return [
        (begin if i % 3 == 0 else []) + rng.choices(range(2, 60), k=n)
        for i, n in enumerate(lengths)
    ]


def tokens_of(engine: Engine, requests: list[list[int]]) -> list[list[int]]:
    """Returns the tokens of requests that are greedy or sampled, with and without drafts."""
    return [handle.result(60).tokens for handle in submit_all(engine, requests)]


def submit_all(engine: Engine, requests: list[list[int]]) -> list[EngineRequest]:
    return [
        engine.submit(
            prompt,
            max_new_tokens=6,
            temperature=0.0 if i % 2 else 0.9,
            seed=i,
            draft=i % 4 < 2,
            ignore_eos=True,
        )
        for i, prompt in enumerate(requests)
    ]


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def wait_until_idle(prefill: RunningServer, decode: Engine, remote: RemotePrefill) -> None:
    """Waits until nothing is open on either side, and compares pages, slots and queues."""
    prefill.wait_until_idle()
    wait_for(lambda: not remote.figures.open_requests)
    wait_for(lambda: b"prefill_answers_open" in idle_figures(prefill))
    for each in (decode, prefill.engine):
        wait_for(lambda each=each: not each.stats().cache_usage)  # steps may be in flight
        each.check_integrity()


def idle_figures(server: RunningServer) -> bytes:
    """Returns the figures of a server that are zero."""
    return b"".join(re.findall(rb"dsv3:.* 0\.0\n", server.request("GET", "/metrics")[2]))


def test_tokens_are_those_of_one_engine(prefill, decode, remote):
    requests = prompts(0)
    got = tokens_of(decode, requests)
    figures = remote.figures
    assert figures.pages > 20
    assert not figures.recomputed_pages
    assert decode.stats().loaded_tokens > 20 * PAGE
    assert got == tokens_of(prefill.engine, requests)
    wait_until_idle(prefill, decode, remote)
    metrics = prefill.request("GET", "/metrics")[2].decode()
    assert f'dsv3:prefill_pages_total{{model_name="demo"}} {figures.pages}.0' in metrics


class Ascending:
    """A grammar: every token is larger than the one before it, by at most 300, up to 1,700."""

    def __init__(self):
        self.last = 10

    def mask(self) -> np.ndarray:
        return TokenMask.of(2048, self._next()).words

    def accept(self, token: int) -> None:
        assert token in self._next()
        self.last = token

    def _next(self) -> range:
        begin = self.last if self.last < 1700 else 10
        return range(begin + 1, begin + 301)


ASKED: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    {"logit_bias": {7: 4.0, 9: 3.0}, "min_tokens": 5, "stop_tokens": [7], "logprobs": 3},
    {"temperature": 0.9, "seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "draft": False},
    {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.9, "draft": False, "logprobs": 2},
    {"allowed_tokens": list(range(100, 130)), "presence_penalty": 2.0},
    {"prompt_logprobs": 2},
    {"grammar": Ascending},
    {"grammar": Ascending, "temperature": 0.8, "seed": 5, "draft": False, "logprobs": 1},
]
"""Settings whose state is a slot's, the host's or the drafter's, and no page's."""


def ask_all(engine: Engine) -> list[EngineRequest]:
    """Submits a prompt with each of the settings, and one more for two completions."""
    rng = random.Random(4)
    handles = []
    for asked in ASKED:
        grammar = asked["grammar"]() if "grammar" in asked else None
        settings = {"ignore_eos": "stop_tokens" not in asked} | asked | {"grammar": grammar}
        prompt = rng.choices(range(2, 60), k=40)
        handles.append(engine.submit(prompt, max_new_tokens=30, **settings))
    settings = {"n": 2, "temperature": 0.7, "seed": 6, "draft": False}
    return handles + engine.submit_all([[3] * 40], max_new_tokens=30, ignore_eos=True, **settings)


@contextlib.contextmanager
def preempting(engine: Engine, most: int) -> Iterator[list[ScheduledRequest]]:
    """Preempts what decodes before every third step, about ``most`` times in all. The engine's
    cache then loses all pages. Yields the preempted requests."""
    scheduler = engine._loop._scheduler
    (shard,), schedule, calls, preempted = scheduler.shards, scheduler.schedule, 0, []

    def preempt_and_schedule(*args: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if not calls % 3 and len(preempted) < most:
            decoding = [request for request in shard.running if request.phase is Phase.DECODE]
            for request in decoding:
                shard.preempt(request)
            preempted.extend(decoding)
            scheduler.clear_prefix_cache()
        return schedule(*args, **settings)

    with mock.patch.object(scheduler, "schedule", preempt_and_schedule):
        yield preempted


def _ids(top: list[list[tuple[int, float]]] | None) -> list[list[int]] | None:
    """Returns the tokens of the most probable ones alone."""
    return None if top is None else [[token for token, _ in each] for each in top]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_keeps_what_it_asked_for(prefill, decode, remote, is_preempted):
    """Also if it loses all its pages on the way. A request that samples has then no drafts: its
    random numbers depend on which tokens were drafts."""
    expected = ask_all(prefill.engine)
    for each in expected:
        each.result(60)
    prefill.engine.clear_prefix_cache(tiers=False)
    decode.clear_prefix_cache(tiers=False)
    pages, reloaded = remote.figures.pages, decode.stats().reloaded_tokens
    with preempting(decode, 2 * len(expected) if is_preempted else 0) as preempted:
        handles = ask_all(decode)
        for handle in handles:
            handle.result(60)
    for handle, one in zip(handles, expected, strict=True):
        done, right = handle.result(60), one.result(60)
        assert (done.tokens, done.finish_reason) == (right.tokens, right.finish_reason)
        assert _ids(done.top_logprobs) == _ids(right.top_logprobs)
        np.testing.assert_allclose(done.logprobs, right.logprobs, atol=1e-4)
        assert (handle.prompt_record is None) == (one.prompt_record is None)
        if handle.prompt_record is not None and one.prompt_record is not None:
            got, wanted = handle.prompt_record.logprobs, one.prompt_record.logprobs
            np.testing.assert_allclose(got[1:], wanted[1:], atol=1e-4)
    assert remote.figures.pages > pages
    if is_preempted:
        assert len(preempted) > len(handles) / 2
        assert decode.stats().reloaded_tokens > reloaded
    wait_until_idle(prefill, decode, remote)


def damaged(frames: list[bytes]) -> list[bytes]:
    """Flips a bit in every second record."""
    return [f[:-90] + bytes([f[-90] ^ 1]) + f[-89:] if i % 2 else f for i, f in enumerate(frames)]


@pytest.mark.parametrize("change", [damaged, lambda frames: [], lambda frames: frames[::-1]])
def test_damage_changes_no_token(prefill, decode, remote, monkeypatch, change):
    offer = HttpSender.offer
    monkeypatch.setattr(HttpSender, "offer", lambda *arguments: change(offer(*arguments)))
    requests, before = prompts(1), remote.figures.recomputed_pages
    decode.clear_prefix_cache(tiers=False)
    assert tokens_of(decode, requests) == tokens_of(prefill.engine, requests)
    assert remote.figures.recomputed_pages != before
    wait_until_idle(prefill, decode, remote)


def test_a_cancelled_request_ends_on_both_sides(prefill, decode, remote):
    with prefill.engine._loop._stepping:  # it runs no step
        request = decode.submit([7] * 50, max_new_tokens=4)
        wait_for(lambda: prefill.service.admission.open)
        request.cancel()
        wait_for(lambda: not prefill.service.admission.open)
    assert request.result(10).finish_reason == "cancelled"
    wait_until_idle(prefill, decode, remote)


def test_a_late_prefill_is_given_up(prefill, decode, remote, monkeypatch):
    monkeypatch.setattr(remote, "_seconds", 0.1)
    with prefill.engine._loop._stepping:
        tokens = decode.submit([8] * 50, max_new_tokens=4).result(30).tokens
        wait_for(lambda: not prefill.service.admission.open)
    assert remote.figures.failures["deadline"] == 1
    wait_until_idle(prefill, decode, remote)
    assert prefill.engine.submit([8] * 50, max_new_tokens=4).result(30).tokens == tokens


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"identity": "0" * 64}, 409, "identity: expected"),
        ({"transfer": "jax"}, 409, r"transfer: expected http \(--transfer\), got jax"),
        ({"num_pages": 3}, 400, "num_pages: expected at most 2 full pages of 17 tokens, got 3"),
        ({"first_page": 2}, 400, "num_pages: expected at most 2 full pages of 17 tokens, got 3"),
        ({"tokens": [10**6] * 17}, 400, "tokens: expected"),
        ({"tokens": [2**31] * 17}, 400, "tokens.0: input should be less than 2147483648"),
        ({"tokens": [5] * 100_000}, 400, "tokens: expected at most"),
        ({"tokens": [5] * 100_000 + ["a"]}, 400, "tokens.100000: input should be a valid integer"),
        ({f"field{i}": 1 for i in range(10_000)}, 400, "Unrecognized .*: field0, field1, field2"),
        ({"first_page": 10**30}, 400, "num_pages: expected at most 2 full pages"),
        ({"seconds": 0}, 400, "seconds: "),
        ({"host": "10.0.0.1"}, 400, "host"),
    ],
)
def test_what_a_prefill_server_refuses(prefill, changes, status, message):
    body = PrefillBody(
        identity=prefill.engine.page_transfer.identity.digest.hex(),
        tokens=[5] * 17,
        first_page=0,
        num_pages=1,
        seconds=5.0,
        transfer="http",
    )
    got, error = prefill.refused(PATH, body.model_dump() | changes)
    assert got == status
    assert re.match(message, error["message"]) or message == error["param"]


VLLM = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None}
"""Parameters that vLLM's proxies send with the first request."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_proxy_for_vllm(prefill, decode_server, remote, path):
    body: dict[str, Any] = {"model": "demo", "temperature": 0, "ignore_eos": True}
    if path == "/v1/completions":
        body |= {"prompt": [9] * 50, "logprobs": 0}
    else:
        body |= {"messages": [{"role": "user", "content": "prefill " * 12}], "logprobs": True}
    first = VLLM | {"do_remote_decode": True, "do_remote_prefill": False}
    answer = prefill.post(path, body | {"max_tokens": 1, "kv_transfer_params": first})
    params = answer["kv_transfer_params"]
    assert params["remote_port"] == prefill.port
    before = remote.figures.pages
    got = decode_server.post(path, body | {"max_tokens": 5, "kv_transfer_params": params})
    assert remote.figures.pages > before
    alone = prefill.post(path, body | {"max_tokens": 5, "kv_transfer_params": None})
    assert got["choices"][0]["logprobs"] == alone["choices"][0]["logprobs"]
    assert "kv_transfer_params" not in got.keys() | alone.keys()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"do_remote_decode": True}, "do_remote_decode: expected a server with --role prefill"),
        (
            {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 80},
            "remote_host: expected the host and port of a --prefill-url, got 10.0.0.1:80",
        ),
    ],
)
def test_what_a_decode_server_refuses_of_a_proxy(decode_server, params, message):
    body = {"model": "demo", "prompt": [9] * 50, "kv_transfer_params": params}
    status, error = decode_server.refused("/v1/completions", body)
    assert (status, error["param"]) == (400, "kv_transfer_params")
    assert error["message"] == f"kv_transfer_params.{message}"


def test_other_weights_are_refused(prefill, decode, remote):
    """As after a change of the weights on one side."""
    decode.clear_prefix_cache()  # gives its pages another identity
    requests = prompts(2)[:4]
    before = remote.figures
    assert tokens_of(decode, requests) == tokens_of(prefill.engine, requests)
    assert remote.figures.failures["refused"] > before.failures.get("refused", 0)
    assert remote.figures.pages == before.pages


def test_the_decode_server_has_data_parallel_attention(checkpoint, prefill, remote):
    layout = make_layout("dp_attention_ep", devices=jax.devices()[:2])
    sharded = dsv3_jax.load(checkpoint, layout=layout)[0]
    before = remote.figures
    with engine(sharded, shards=2, sources=(remote,), load_seconds=60.0) as decode:
        requests = prompts(3)
        assert tokens_of(decode, requests) == tokens_of(prefill.engine, requests)
        decode.check_integrity()
        assert decode.stats().loaded_tokens > 20 * PAGE
    assert remote.figures.pages - before.pages > 20
    assert remote.figures.failures == before.failures


PROCESS = """
import sys
from pathlib import Path
import dsv3_jax
from dsv3_jax.disaggregation.jax_transfer import JaxSender
from dsv3_jax.server.run import bind, run
from dsv3_jax.server.service import ServerSettings
from tests.disaggregation.test_servers import MAX_LEN, engine

model, tokenizer = dsv3_jax.load(sys.argv[1])[0], dsv3_jax.load("demo")[1]
with engine(model, host_bytes=2**24) as it:
    settings = ServerSettings("demo", MAX_LEN, 64, program_store=Path(sys.argv[2]))
    run(it, tokenizer, settings, bind("127.0.0.1", 0), sender=JaxSender("127.0.0.1"))
"""


def test_a_prefill_process_is_killed(checkpoint, model, prefill, store):
    """Requests that are under way end with the right tokens, and so do later ones."""
    command = [sys.executable, "-c", PROCESS, str(checkpoint), str(store)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            url = next(m[0] for line in lines if (m := re.search(r"http://[\d.:]+", line)))
            next(line for line in lines if "ready: compiled" in line)
            remote = RemotePrefill(
                Peers([url]), JaxReceiver(), page_size=PAGE, max_page_bytes=2**20, seconds=10.0
            )
            with engine(model, sources=(remote,), load_seconds=20.0) as decode:
                decode.warm_up(store)
                requests = [prompt for seed in range(5, 9) for prompt in prompts(seed)]
                handles = submit_all(decode, requests)
                while remote.figures.pages < 20:
                    time.sleep(0.001)
                process.send_signal(signal.SIGKILL)
                got = [handle.result(60).tokens for handle in handles]
                assert remote.figures.failures["connection"] > 0
                assert sum(remote.figures.recomputed_pages.values()) > 0
                assert got == tokens_of(prefill.engine, requests)
                decode.check_integrity()
                assert remote.figures.open_requests == 0
            remote.close()
        finally:
            process.kill()
