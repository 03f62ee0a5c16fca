"""The torch child process of the kernel benchmark: runs the peers' kernels.

Each peer is loaded separately, from the archive of :mod:`benchmarks.kernels.pack_peers` or from
torch. If it cannot be loaded or returns wrong results, the report records the reason. Times are of
CUDA graph replays over rotated inputs, measured by the stamps of :mod:`benchmarks.kernels.clock` at
the beginning and end of each graph. They exclude what a peer computes once per step (FlashMLA's
scheduler metadata, Marlin's order of rows) and the conversion of inputs to the peer's layout
(DeepGEMM's scales, Marlin's matrices, padded groups).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.kernels import attention_peers, clock, grouped_peers, sparse_peers
from benchmarks.kernels import peer as libraries
from benchmarks.kernels.peer import Inputs, Peer, Tensor
from benchmarks.kernels.shapes import (
    Case,
    Decode,
    Prefill,
    SparseCase,
    Swiglu,
    decoded,
    guessed_us,
    rotation,
)
from benchmarks.kernels.torch_timing import Timed
from benchmarks.kernels.workers import Reply, reason, serve

TOLERANCE = 4 * 2.0**-8  # relative to a row's norm; twice ours, because peers may round once more


def family_of(case: Case) -> ModuleType:
    """Returns the module of a case's op. It has ``make``, ``peers_of`` and ``sample``."""
    if isinstance(case, SparseCase):
        return sparse_peers
    return attention_peers if isinstance(case, Decode | Prefill) else grouped_peers


def peers_of(case: Case, directory: Path) -> Iterator[tuple[str, Callable[[], Peer]]]:
    """Yields the names of a case's peers, with functions that build them or raise the reason."""
    if isinstance(case, Swiglu):
        for name, build in peers_of(case.product, directory):
            yield f"{name}, both products without SiLU", build
    else:
        yield from family_of(case).peers_of(case, directory)


def wrong(case: Case, x: Inputs, out: Tensor) -> str | None:
    """Returns None if sampled rows of ``out`` agree with float32, else a message."""
    got, want = family_of(case).sample(case, x, out)
    error = ((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
    return None if error <= TOLERANCE else f"wrong: relative error {error:.3g}"


class Session:
    """Handles the requests of the parent process."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._graphs: dict[str, Timed] = {}

    def start(self) -> Reply:
        versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
        try:
            libraries.deep_gemm(self._directory)
            versions["deep_gemm_jit"] = libraries.jit_compiler(os.environ)
        except Exception as error:
            versions["deep_gemm_jit"] = reason(error)
        return {"versions": versions, "gpu": torch.cuda.get_device_name(), "clock": clock.NAME}

    def prepare(self, case: dict[str, Any]) -> Reply:
        """Prepares a case's peers; returns {"peers": {peer: {} or {"error": reason}}}."""
        self.release()
        return {"peers": self._prepare(decoded(case))}

    def _prepare(self, case: Case) -> Reply:
        sets, laps = rotation(case, guessed_us(case))
        available = list(peers_of(case, self._directory))
        case = case.product if isinstance(case, Swiglu) else case
        arrays: list[Inputs] = []
        replies: Reply = {}
        for name, build in available:
            try:
                peer = build()
                arrays = arrays or [family_of(case).make(case, seed) for seed in range(sets)]
                replies[name] = self._capture(case, name, peer, arrays, laps)
            except Exception as error:
                replies[name] = {"error": reason(error)}
            torch.cuda.synchronize()
        return replies

    def _capture(self, case: Case, name: str, peer: Peer, arrays: list[Inputs], laps: int) -> Reply:
        prepared = [peer.prepare(x) for x in arrays]
        out = peer.rows(prepared[0], peer.call(prepared[0]))
        if fault := wrong(case, arrays[0], out):
            return {"error": fault}
        del out
        self._graphs[name] = Timed([functools.partial(peer.call, p) for p in prepared], laps)
        return {}

    def time(self, names: list[str], warm_s: float) -> Reply:
        """Times prepared peers; returns {peer: result of :meth:`Timed.windows`}."""
        return {name: self._graphs[name].windows(warm_s) for name in names}

    def release(self) -> Reply:
        self._graphs.clear()
        torch.cuda.empty_cache()
        return {}

    def warm(self, cases: list[dict[str, Any]]) -> Reply:
        """Lets DeepGEMM, and the driver for Marlin, fill their persistent kernel caches."""
        for case in map(decoded, cases):
            case = case.product if isinstance(case, Swiglu) else case
            for peer, build in peers_of(case, self._directory):
                if peer.startswith(("DeepGEMM", "Marlin")):
                    try:
                        made = build()
                        made.call(made.prepare(family_of(case).make(case, 0)))
                        torch.cuda.synchronize()
                    except Exception as error:
                        print(case.shape, peer, reason(error), flush=True)
            torch.cuda.empty_cache()
        return {}


def main() -> None:
    session = Session(Path(sys.argv[1]))
    serve({
        "start": session.start, "prepare": session.prepare, "time": session.time,
        "release": session.release, "warm": session.warm,
    })  # fmt: skip


if __name__ == "__main__":
    main()
