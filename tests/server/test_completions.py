"""/v1/completions with OpenAI's own client, and with raw bodies."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from types import SimpleNamespace

import openai
import pytest

from tests.server.conftest import MAX_LEN, MAX_REQUESTS, MAX_RUNNING

PROMPT = "def read_config(path):"


def body(**fields):
    return {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}


def joined(chunks) -> list[str]:
    """Returns the text of each completion of a stream."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return [texts[i] for i in sorted(texts)]


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert model.max_model_len == MAX_LEN
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="`gpt-4` does not exist") as raised:
        client.models.retrieve("gpt-4")
    assert raised.value.code == "model_not_found"


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}]
)
def test_text_is_that_of_the_engine(client, server, settings):
    completion = client.completions.create(**body(**settings))
    expected = server.engine.submit(PROMPT, max_new_tokens=8, **settings).result(60)
    (choice,) = completion.choices
    assert choice.text == expected.text
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert completion.object == "text_completion"
    assert completion.usage.prompt_tokens == expected.prompt_tokens
    assert completion.usage.completion_tokens == 8
    assert completion.usage.total_tokens == expected.prompt_tokens + 8


def test_several_prompts_and_completions(client, server):
    ids = [server.tokenizer.encode(text) for text in ("class A", "import os\n")]
    texts = client.completions.create(**body(prompt=["class A", "import os\n"], n=2))
    tokens = client.completions.create(**body(prompt=ids, n=2))
    assert [c.index for c in texts.choices] == [0, 1, 2, 3]
    assert [c.text for c in texts.choices] == [c.text for c in tokens.choices]
    assert texts.choices[0].text == texts.choices[1].text != texts.choices[2].text
    assert texts.usage.prompt_tokens == sum(map(len, ids))
    assert texts.usage.completion_tokens == 32
    single = client.completions.create(**body(prompt=ids[1]))
    assert single.choices[0].text == texts.choices[2].text


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["\n", "return"]},
        {"temperature": 1.3, "seed": 3, "n": 3},
        {"prompt": ["# Привет, 世界", "x = '🙂"], "temperature": 1.5, "seed": 11, "echo": True},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"17": -100}},
        {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 4}},
    ],
    ids=["stop", "n", "echo", "penalties", "extra"],
)
def test_joined_chunks_are_the_text(client, fields):
    fields = body(**{"max_tokens": 24, **fields})
    whole = client.completions.create(**fields)
    chunks = list(
        client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    assert joined(chunks) == [choice.text for choice in whole.choices]
    assert chunks[-1].choices == []
    cached = {"cached_tokens": 0}  # the second request finds the pages of the first one
    assert chunks[-1].usage.model_dump() | {"prompt_tokens_details": cached} == (
        whole.usage.model_dump() | {"prompt_tokens_details": cached}
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(reasons) == sorted(choice.finish_reason for choice in whole.choices)


def test_stop_string_is_left_out(client):
    text = client.completions.create(**body(max_tokens=40)).choices[0].text
    stop = text[10:14]
    choice = client.completions.create(**body(max_tokens=40, stop=stop)).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_logprobs_and_echo(client, server):
    fields = body(logprobs=3, echo=True, max_tokens=4)
    choice = client.completions.create(**fields).choices[0]
    logprobs = choice.logprobs
    prompt = server.tokenizer.encode(PROMPT)
    count = len(prompt) + 4
    assert choice.text.startswith(PROMPT)
    lengths = map(len, (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs))
    assert set(lengths) == {count}
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs[1:])
    # Greedy tokens are the most probable ones.
    for token, top in list(zip(logprobs.tokens, logprobs.top_logprobs, strict=True))[-4:]:
        assert token == max(top, key=top.get)
    bos = server.tokenizer.bos_token
    assert logprobs.tokens[0] == bos
    assert "".join(logprobs.tokens).startswith(bos + PROMPT)
    assert logprobs.text_offset[:2] == [0, 0]  # the text has no BOS
    expected = server.engine.submit(prompt, max_new_tokens=4, prompt_logprobs=3, logprobs=3)
    completion = expected.result(60)
    values = [*completion.prompt_logprobs[1:], *completion.logprobs]
    assert logprobs.token_logprobs[1:] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_logprobs_are_the_same(client, echo):
    text = client.completions.create(**body(max_tokens=24)).choices[0].text
    fields = body(prompt=[PROMPT, "# Привет"], n=2, logprobs=2, max_tokens=24)
    fields |= {"stop": [text[7:10], "\n\n"], "echo": echo}
    whole = client.completions.create(**fields)
    streamed: list[list] = [[] for _ in whole.choices]
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index].append(choice)
    for parts, choice in zip(streamed, whole.choices, strict=True):
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            entries = [entry for part in parts for entry in getattr(part.logprobs, name)]
            assert entries == getattr(choice.logprobs, name)


def check_entries(text: str, logprobs, tokenizer, ids: list[int]) -> None:
    """Checks that the tokens' texts are the text, that offsets point at them, and that the tokens
    are ``ids``. Special tokens have their names, and no text."""
    special = [tokenizer.token_bytes(i) is None for i in ids]
    assert len(logprobs.tokens) == len(ids) == len(logprobs.text_offset)
    texts = ["" if s else t for s, t in zip(special, logprobs.tokens, strict=True)]
    assert "".join(texts) == text
    begins = [len("".join(texts[:i])) for i in range(len(texts))]
    assert logprobs.text_offset == begins
    for i, token in enumerate(ids):
        if special[i]:
            assert logprobs.tokens[i] == tokenizer.decode([token], skip_special_tokens=False)
        top = logprobs.top_logprobs[i]
        assert top is None or logprobs.tokens[i] in top


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_index_the_text_for_any_tokens(client, server, stream):
    """Also with tokens that are parts of characters, at both ends, and with special tokens."""
    tokenizer = server.tokenizer
    characters = tokenizer.encode("世🙂\u0950é", add_special_tokens=False)
    assert any("\ufffd" in tokenizer.decode([i]) for i in characters)  # several tokens each
    rng = random.Random(0)
    prompts = [
        [0, *characters, 1, *(rng.randrange(3, 260) for _ in range(6))],
        [*characters[1:], *(rng.randrange(tokenizer.vocab_size) for _ in range(9))],
        [0, *tokenizer.encode("x = '", add_special_tokens=False), *characters[:-1]],
    ]
    bias = {str(i): 100 for i in rng.sample(range(131, 260), 9)}  # lone bytes, mostly
    fields = body(prompt=prompts, n=2, echo=True, logprobs=2, max_tokens=9, logit_bias=bias)
    fields |= {"temperature": 1, "seed": 3, "stream": stream, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(**fields)
    parts: list[list] = [[] for _ in range(6)]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            parts[choice.index].append(choice)
    incomplete = 0
    for i, choices in enumerate(parts):
        merged = SimpleNamespace(tokens=[], text_offset=[], top_logprobs=[])
        for choice in choices:
            for name in vars(merged):
                getattr(merged, name).extend(getattr(choice.logprobs, name))
        text = "".join(choice.text for choice in choices)
        prompt = prompts[i // 2]
        settings = {"temperature": 1, "seed": 3 + i % 2, "ignore_eos": True, "max_new_tokens": 9}
        biases = {int(token): value for token, value in bias.items()}
        new = server.engine.submit(prompt, logit_bias=biases, **settings).result(60).tokens
        check_entries(text, merged, tokenizer, [*prompt, *new])
        incomplete += merged.tokens.count("")
    assert incomplete > 10


def test_scoring_generates_nothing(client, server):
    """lm_eval asks for log-probabilities of a prompt alone."""
    completion = client.completions.create(**body(max_tokens=0, echo=True, logprobs=1))
    assert completion.choices[0].text == PROMPT
    assert len(completion.choices[0].logprobs.tokens) == completion.usage.prompt_tokens
    assert completion.usage.completion_tokens == 0


def test_text_never_becomes_a_control_token(client, server):
    prompt = f"a{server.tokenizer.eos_token}b"
    completion = client.completions.create(**body(prompt=prompt))
    assert completion.usage.prompt_tokens > len(server.tokenizer.encode("ab")) + 3


def test_async_clients_together(server):
    async def run():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def stream(i):
                chunks = await client.completions.create(**body(seed=i), stream=True)
                return joined([chunk async for chunk in chunks])

            async def whole(i):
                completion = await client.completions.create(**body(seed=i))
                return [choice.text for choice in completion.choices]

            return await asyncio.gather(*(f(i) for i in range(5) for f in (stream, whole)))

    texts = asyncio.run(run())
    assert texts == [texts[0]] * 10


@pytest.mark.slow
def test_overload(server):
    """As many requests as may run and wait are served; others get status 503 at once."""

    async def run():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            fields = body(max_tokens=40, extra_body={"ignore_eos": True})
            asked = (client.completions.create(**fields) for _ in range(MAX_REQUESTS + 8))
            return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(run())
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    assert len(errors) == 8
    for error in errors:
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503
        assert error.response.headers["retry-after"] == "1"
        assert error.code == "overloaded"
    server.wait_until_idle()
    assert server.post("/v1/completions", body())["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels(server, stream):
    server.wait_until_idle()
    fields = {**body(max_tokens=200, stream=stream), "n": MAX_RUNNING, "ignore_eos": True}
    content = json.dumps(fields).encode()
    before = server.engine.stats().output_tokens
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        while server.engine.stats().output_tokens == before:
            time.sleep(0.002)
    server.wait_until_idle()
    assert server.engine.stats().output_tokens - before < 200 * MAX_RUNNING
    server.engine.check_integrity()


def test_closing_a_stream_cancels(client, server):
    fields = body(max_tokens=200, extra_body={"ignore_eos": True})
    with client.completions.create(**fields, stream=True) as stream:
        next(iter(stream))
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"frobnicate": 1}, "frobnicate", "Unrecognized request argument supplied: frobnicate"),
        ({"temperature": "hot"}, "temperature", "temperature: input should be a valid number;"),
        ({"temperature": 3}, "temperature", "less than or equal to 2; got 3"),
        ({"top_p": 0}, "top_p", "greater than 0; got 0"),
        ({"n": 0}, "n", "greater than or equal to 1; got 0"),
        ({"n": True}, "n", "valid integer; got True"),
        ({"n": MAX_REQUESTS + 1}, "n", "at most 12 completions"),
        ({"best_of": 3}, "best_of", "best_of: expected none, as it is not supported"),
        ({"suffix": "x"}, "suffix", "suffix: expected none, as it is not supported"),
        ({"prompt": []}, "prompt", "prompt: "),
        ({"prompt": ""}, "prompt", "got an empty prompt"),
        ({"prompt": [[]]}, "prompt", "prompt.0: "),
        ({"prompt": [10**6]}, "prompt", "prompt: expected token ids from 0 to"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"prompt": {"a": 1}}, "prompt", "prompt: "),
        ({"max_tokens": 0}, "max_tokens", "at least 1 without echo"),
        ({"max_tokens": 500}, "max_tokens", "max_tokens: expected at most"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "expected token ids as keys, got 'x'"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "biases in [-100, 100]"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "token ids from 0 to"),
        ({"stop": [""]}, "stop", "at least 1 character"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 items"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "supplied: stream_options.x"),
        ({"seed": 2**70}, "seed", "seed: "),
    ],
)
def test_errors_name_the_field(server, fields, param, message):
    status, error = server.refused("/v1/completions", body(**fields))
    assert status == 400
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_too_long_prompts(server, client):
    with pytest.raises(openai.BadRequestError, match="expected at most 255 tokens") as raised:
        client.completions.create(**body(prompt="x = 1\n" * 300))
    assert raised.value.code == "context_length_exceeded"
    assert raised.value.param == "prompt"


def test_other_model(client):
    with pytest.raises(openai.NotFoundError, match="expected `demo`"):
        client.completions.create(**body(model="gpt-4"))


def test_requests_do_not_wait_for_a_slow_body(server):
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert server.post("/v1/completions", body())["choices"]


def test_threads_and_event_loop_do_not_block_each_other(server):
    """Probes answer while a long prompt is encoded and others generate."""
    fields = body(prompt="word " * 300_000)
    thread = threading.Thread(target=server.request, args=("POST", "/v1/completions", fields))
    thread.start()
    longest = 0.0
    while thread.is_alive():
        began = time.monotonic()
        assert server.request("GET", "/health")[0] == 200
        longest = max(longest, time.monotonic() - began)
    thread.join()
    assert longest < 2
