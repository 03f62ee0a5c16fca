"""Compares prefill and decode on separate servers with one server, while servers are killed.

    python -m scripts.bench_disaggregation --out benchmarks/results/disaggregation_cpu.json
    python -m scripts.bench_disaggregation --requests 20 --rounds 1 --transfer jax

A server on its own answers random requests first. Then two prefill and two decode servers get all
of them, and in every later round a random part of them, while one server of each role is killed
(SIGKILL) at a random moment and restarted. Some clients go away before their answer. A client whose
decode server is killed sends its request to the other one. Every answer has to have the same text
and token texts as the single server's, or an error. After each round all servers must be idle, with
no page in use, and their pages, slots and queues must agree.

At the end the time to the first token of cold prompts is measured on both. On a CPU all processes
share the cores: these times say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.decode import machine
from benchmarks.serving.role_processes import RoleProcess, free_ports, running
from dsv3_jax.files import atomic_write

_VOCABULARY = range(300, 2000)  # of the demo, without special tokens
_CONCURRENCY = 16
_ABORTED = 0.05
"""Share of the requests whose clients go away."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of one request, as its client sees it."""

    outcome: str
    """``right``, ``wrong``, ``gone`` (the client), ``error``, or what should not happen."""
    detail: Any = None
    retries: int = 0
    """Number of times that its server was down and it was sent to the other one."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare servers of separate roles with one.")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=20, help="rounds with kills")
    parser.add_argument("--part", type=float, default=0.2, help="share of the requests in a round")
    parser.add_argument("--transfer", choices=("http", "jax"), default="http")
    parser.add_argument(
        "--small",
        action="store_true",
        help="engines of one program and 1,024 tokens, for a machine with few cores",
    )
    parser.add_argument("--draft", choices=("none", "mtp"), default="mtp")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-tokens", type=int, default=20, help="prompts timed at the end")
    parser.add_argument("--work", type=Path, help="directory of logs and programs (default: new)")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def random_requests(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Returns bodies of requests. Some prompts begin alike."""
    prefixes = [rng.choices(_VOCABULARY, k=rng.randint(64, 300)) for _ in range(10)]
    bodies = []
    for _ in range(count):
        prefix = rng.choice(prefixes) if rng.random() < 0.3 else []
        prompt = [*prefix, *rng.choices(_VOCABULARY, k=rng.randint(1, 400))]
        is_greedy = rng.random() < 0.5
        bodies.append(
            {
                "model": "demo",
                "prompt": prompt,
                "max_tokens": rng.randint(1, 24),
                "temperature": 0 if is_greedy else rng.choice((0.7, 1.0)),
                "top_p": 1 if is_greedy else rng.choice((0.9, 1.0)),
                "seed": rng.randrange(2**32),
                "logprobs": 0,
            }
        )
    return bodies


def part_compared(body: dict[str, Any]) -> Any:
    """Returns the text, the token texts and the end of an answer."""
    choice = body["choices"][0]
    return choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    """Returns the compared part of an answer.

    Raises:
      RuntimeError: the server answered with an error.
    """
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        content = await answer.json()
        if answer.status != 200:
            error = content["error"]
            raise RuntimeError(f"{answer.status} {error['code']}: {error['message']}")
        return part_compared(content)


async def reference(url: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns the answers of one server."""
    room = asyncio.Semaphore(_CONCURRENCY)

    async def one(session: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
        async with room:
            return await complete(session, url, body)

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(one(session, body) for body in bodies))


async def play_round(
    bodies: Sequence[dict[str, Any]],
    expected: Sequence[Any],
    numbers: Sequence[int],
    prefill: Sequence[RoleProcess],
    decode: Sequence[RoleProcess],
    rng: random.Random,
    seconds: float | None,
) -> list[Answer]:
    """Sends requests, and kills one server of each role meanwhile.

    Args:
      numbers: of the requests, in order.
      seconds: time in which the kills happen. None kills nothing.
    """
    left = iter(numbers)
    answers: list[Answer] = []
    goes_away = {i: rng.uniform(0, 0.5) for i in numbers if rng.random() < _ABORTED}
    down: set[RoleProcess] = set()

    async def answer_to(session: aiohttp.ClientSession, i: int, retries: int = 0) -> Answer:
        server = decode[(i + retries) % len(decode)]
        kills = server.kills
        try:
            async with asyncio.timeout(goes_away.get(i, 120)):
                got = await complete(session, server.url, bodies[i])
        except TimeoutError:
            outcome = "gone" if i in goes_away else "no answer within 120 s"
            return Answer(outcome, retries=retries)
        except aiohttp.ClientError as error:
            if kills == server.kills and server not in down:
                return Answer("lost by a server that was not killed", repr(error))
            await asyncio.sleep(0.1)
            return await answer_to(session, i, retries + 1)
        except RuntimeError as error:
            return Answer("error", str(error), retries)
        if got == expected[i]:
            return Answer("right", retries=retries)
        return Answer("wrong", {"request": i, "expected": expected[i], "got": got})

    async def client(session: aiohttp.ClientSession) -> None:
        for i in left:
            answers.append(await answer_to(session, i))

    async def killer(servers: Sequence[RoleProcess]) -> None:
        if seconds is None:
            return
        await asyncio.sleep(rng.uniform(0, seconds))
        server = rng.choice(servers)
        down.add(server)
        server.kill()
        await asyncio.sleep(rng.uniform(0, 1))
        server.start()
        await asyncio.to_thread(server.wait_until_ready)
        down.discard(server)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [client(session) for _ in range(_CONCURRENCY)]
        await asyncio.gather(*clients, killer(prefill), killer(decode))
    return answers


async def first_token_seconds(url: str, prompt: list[int]) -> float:
    """Returns the time to the first token of one request."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    async with aiohttp.ClientSession() as session:
        began = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            await answer.content.readline()
            return time.perf_counter() - began


def time_first_tokens(urls: dict[str, str], count: int, rng: random.Random) -> dict[str, Any]:
    """Returns the median time to the first token of cold prompts, on each server in turn."""
    figures: dict[str, Any] = {}
    for length in (256, 1024):
        seconds: dict[str, list[float]] = {name: [] for name in urls}
        for _ in range(count):
            for name, url in urls.items():
                prompt = rng.choices(_VOCABULARY, k=length)
                seconds[name].append(asyncio.run(first_token_seconds(url, prompt)))
        figures[f"{length} tokens"] = {
            name: round(1e3 * statistics.median(each), 1) for name, each in seconds.items()
        }
    return figures


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    rng = random.Random(arguments.seed)
    work = arguments.work or Path(tempfile.mkdtemp(prefix="disaggregation-"))
    work.mkdir(parents=True, exist_ok=True)
    flags = ["--model", "demo", "--draft", arguments.draft, "--dtype", arguments.dtype]
    if arguments.small:
        flags += ["--max-running", "4", "--max-len", "1024", "--one-process"]
    else:
        flags += ["--max-running", "16", "--max-len", "2048", "--cache-tokens", "8192"]
    flags += ["--program-store", str(work / "programs")]
    ports = free_ports(5)
    process = functools.partial(RoleProcess, is_small=arguments.small)
    transfer = ["--transfer", arguments.transfer]
    prefill = [
        process(f"prefill {i}", port, [*flags, "--role", "prefill", *transfer], work / f"p{i}")
        for i, port in enumerate(ports[:2])
    ]
    peers = [word for each in prefill for word in ("--prefill-url", each.url)]
    decode = [
        process(
            f"decode {i}",
            port,
            [*flags, "--role", "decode", *transfer, *peers, "--prefill-seconds", "10"],
            work / f"d{i}",
        )
        for i, port in enumerate(ports[2:4])
    ]
    single = process("single", ports[4], flags, work / "single")
    bodies = random_requests(arguments.requests, rng)
    result: dict[str, Any] = {
        **machine.description(),
        "cores": os.cpu_count(),
        "command": "python -m scripts.bench_disaggregation " + " ".join(words),
        "requests": arguments.requests,
        "transfer": arguments.transfer,
        "draft": arguments.draft,
        "small": arguments.small,
        "rounds": [],
    }
    with running([single]):
        began = time.monotonic()
        expected = asyncio.run(reference(single.url, bodies))
        seconds = time.monotonic() - began
        again = asyncio.run(reference(single.url, bodies))
        result["single_server_differs_from_itself"] = sum(
            a != b for a, b in zip(expected, again, strict=True)
        )
    totals: collections.Counter[str] = collections.Counter()
    figures: collections.Counter[str] = collections.Counter()  # without those of killed processes
    failures: list[Any] = []
    with running([*prefill, *decode]):
        for number in range(arguments.rounds + 1):
            began = time.monotonic()
            part = 1.0 if number == 0 else arguments.part
            sent = rng.sample(range(len(bodies)), round(part * len(bodies)))
            kill_seconds = part * seconds if number else None
            answers = asyncio.run(
                play_round(bodies, expected, sent, prefill, decode, rng, kill_seconds)
            )
            outcomes = collections.Counter(answer.outcome for answer in answers)
            totals += outcomes
            failures += [a.detail or a.outcome for a in answers if a.detail or " " in a.outcome]
            for process in (*prefill, *decode):
                figures += process.new_counts(process.wait_until_idle())
                process.check_integrity()
            row = {
                "kills": 2 * (number > 0),
                "seconds": round(time.monotonic() - began, 1),
                "retries": sum(answer.retries for answer in answers),
                **outcomes,
            }
            result["rounds"].append(row)
            print(json.dumps({"round": number, **row}), file=sys.stderr)
            _write(arguments.out, result, totals, figures, failures)
        result["exit_status"] = {p.name: p.stop() for p in (*prefill, *decode)}
    if arguments.first_tokens:
        with running([*prefill, *decode, single]):
            urls = {"single": single.url, "prefill and decode": decode[0].url}
            time_first_tokens(urls, 2, rng)  # the first steps of a program are slower
            result["first_token_ms"] = time_first_tokens(urls, arguments.first_tokens, rng)
    _write(arguments.out, result, totals, figures, failures)
    print(json.dumps(result))
    return 1 if totals["wrong"] or any(" " in outcome for outcome in totals) else 0


def _write(
    out: Path | None,
    result: dict[str, Any],
    totals: collections.Counter[str],
    figures: collections.Counter[str],
    failures: list[Any],
) -> None:
    result["outcomes"] = dict(totals)
    result["counts_of_servers"] = {name: round(n, 1) for name, n in sorted(figures.items())}
    result["failures"] = failures[:20]
    if out is not None:
        atomic_write(out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
