"""Tries to make a tier on disk return a wrong page: killed writers, flipped bits, two processes.

    python -m tests.pages.page_damage write DIRECTORY SEED
    python -m tests.pages.page_damage exchange DIRECTORY SEED SECONDS

These are the child processes of :func:`kill_writers` and :func:`two_processes`. The contents of a
page follow from its address, so that every process can check every page. No JAX is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsv3_jax.pages import CacheIdentity, PageAddress, PageArray, PageFormat, PageRecord
from dsv3_jax.pages.disk import DiskPages

_FORMAT = PageFormat(16, (PageArray("layers.0.latent", 8192, "float32"),))
_IDENTITY = CacheIdentity("a model", _FORMAT, lookahead=1)
_PAGES = 16
"""Pages of a prompt."""
_PROMPTS = 4
"""Prompts that each process writes, again and again."""
_SECONDS = 60.0


class WrongPageError(Exception):
    """A page came back with other contents than were stored."""


def addresses(seed: int) -> list[PageAddress]:
    """Returns the addresses of a prompt's pages."""
    tokens = np.random.default_rng(seed).integers(0, 10**5, _PAGES * _FORMAT.page_size + 1)
    return _IDENTITY.addresses(tokens.tolist())


def record_of(address: PageAddress) -> PageRecord:
    """Returns the page of an address. It is always the same."""
    random = np.random.default_rng(list(address.digest))
    payload = random.integers(0, 256, _FORMAT.num_bytes, dtype=np.uint8)
    return PageRecord(_IDENTITY.digest, address, _FORMAT, payload)


def capacity(prompts: float) -> int:
    """Returns the bytes that a number of prompts occupy on the disk."""
    return int(prompts * _PAGES * len(record_of(addresses(0)[0]).encode()))


def read(disk: DiskPages, wanted: list[PageAddress]) -> int:
    """Returns how many leading pages come back.

    Raises:
      WrongPageError: one of them is wrong.
    """
    records = disk.fetch(wanted).result(_SECONDS)
    for record, address in zip(records, wanted, strict=False):
        record.check(_IDENTITY, address)
        if record.payload.tobytes() != record_of(address).payload.tobytes():
            raise WrongPageError(address.digest.hex())
    return len(records)


@contextlib.contextmanager
def opened(directory: Path, size: int) -> Iterator[DiskPages]:
    """Opens a tier, and closes it at the end."""
    disk = DiskPages(directory, size)
    try:
        yield disk
    finally:
        disk.close(_SECONDS)


def kill_writers(directory: Path, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Kills one of two writers at a random moment, and then reads every page of both.

    The directory has room for half of what they write, so that they also delete files.

    Returns:
      How many pages were right, and how many unfinished files the killed writers left.
    """
    random = np.random.default_rng(seed)
    right = unfinished = 0
    size = capacity(_PROMPTS)
    for number in range(rounds):
        seeds = [1000 * number, 1000 * number + 500]
        children = [_child(subprocess.DEVNULL, "write", directory, each) for each in seeds]
        try:
            _wait_for(lambda: any(_is_written(directory, each) for each in seeds))  # noqa: B023
            time.sleep(random.uniform(0.0, 0.8))
            children[0].send_signal(signal.SIGKILL)
            children[0].wait()
            # The other one goes on, reads the same directory, and ends with it.
            time.sleep(random.uniform(0.0, 0.1))
        finally:
            for child in children:
                child.kill()
                child.wait()
        unfinished += len(list(directory.glob("??/.*.partial")))
        with opened(directory, size) as disk:
            for prompt in itertools.chain.from_iterable(range(s, s + _PROMPTS) for s in seeds):
                for address in addresses(prompt):
                    right += read(disk, [address])
            stats = disk.stats()
            files = sum(path.stat().st_size for path in directory.glob("??/*"))
            assert files == stats.used_bytes <= size, "the directory is larger than it may be"
            assert not stats.damaged_pages, "a killed writer published an unfinished file"
    return {"rounds": rounds, "right": right, "wrong": 0, "unfinished_files": unfinished}


def flip_bits(directory: Path, flips: int, seed: int = 0) -> dict[str, Any]:
    """Flips one bit of one file at a time. The page must be refused, and no other one."""
    random = np.random.default_rng(seed)
    pages = addresses(seed)
    right = refused = 0
    with opened(directory, capacity(2)) as disk:
        for number in range(flips):
            disk.store([record_of(address) for address in pages])
            assert disk.flush(_SECONDS)
            victim = int(random.integers(_PAGES))
            (path,) = directory.glob(f"??/{pages[victim].digest.hex()}.page")
            data = bytearray(path.read_bytes())
            # Half of them in the header, which is a small part of the file.
            byte = int(random.integers(len(data) if number % 2 else 600))
            data[byte] ^= 1 << int(random.integers(8))
            path.write_bytes(data)
            count = read(disk, pages)
            right += count
            assert count == victim, "a damaged page came back, or a good one did not"
            refused += 1
        assert disk.stats().damaged_pages == flips
    return {"flips": flips, "right": right, "wrong": 0, "refused": refused}


def two_processes(directory: Path, seconds: float) -> dict[str, Any]:
    """Two processes write, read and delete the same pages in one directory."""
    children = [_child(subprocess.PIPE, "exchange", directory, seed, seconds) for seed in (1, 2)]
    outputs = [child.communicate(timeout=seconds + _SECONDS)[0] for child in children]
    if any(child.returncode for child in children):
        raise WrongPageError(f"a process failed: {[child.returncode for child in children]}")
    counts = [json.loads(output) for output in outputs]
    return {
        "seconds": seconds,
        "right": sum(count["right"] for count in counts),
        "wrong": 0,
        "refused": sum(count["refused"] for count in counts),
        "written": sum(count["written"] for count in counts),
    }


def _write(directory: Path, seed: int) -> None:
    """Writes prompts until the process is killed."""
    # Made before, so that most of the time is spent in writing.
    prompts = [
        [record_of(address) for address in addresses(prompt)]
        for prompt in range(seed, seed + _PROMPTS)
    ]
    with opened(directory, capacity(_PROMPTS)) as disk:
        for records in itertools.cycle(prompts):
            disk.store(records)
            disk.flush(_SECONDS)


def _exchange(directory: Path, seed: int, seconds: float) -> dict[str, int]:
    """Writes pages of common prompts and reads them, with room for half of them."""
    random = np.random.default_rng(seed)
    end, right = time.monotonic() + seconds, 0
    with opened(directory, capacity(_PROMPTS / 2)) as disk:
        while time.monotonic() < end:
            wanted = addresses(int(random.integers(_PROMPTS)))
            if random.random() < 0.5:
                count = int(random.integers(1, _PAGES))
                disk.store([record_of(address) for address in wanted[:count]])
                disk.flush(_SECONDS)
            right += read(disk, wanted)
        stats = disk.stats()
    return {"right": right, "refused": stats.damaged_pages, "written": stats.stored_pages}


def _child(stdout: int, *words: str | Path | float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.pages.page_damage", *map(str, words)]
    return subprocess.Popen(command, stdout=stdout, text=True)


def _is_written(directory: Path, seed: int) -> bool:
    digest = addresses(seed)[0].digest.hex()
    return (directory / digest[:2] / f"{digest}.page").exists()


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < end, "a process did not begin to write"
        time.sleep(0.01)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    what, folder, number, *rest = sys.argv[1:]
    if what == "write":
        _write(Path(folder), int(number))
    else:
        print(json.dumps(_exchange(Path(folder), int(number), float(rest[0]))))
