"""Packs what the benchmark's peers need out of vLLM's wheel, into one file.

    pip download --no-deps vllm==0.22.0 && python -m benchmarks.kernels.pack_peers vllm-*.whl DIR

DIR/peers.tar.xz then holds the extension modules of FlashMLA, FlashAttention-3 and Marlin, less
what they have for other GPUs than Hopper's, and DeepGEMM with the headers that it compiles with:
27 MB of the wheel's 260. The wheel itself need not be installed.
DeepGEMM compiles a kernel a shape in ten seconds or so: ``tar cf DIR/jit.tar -C
/tmp/dsv3_kernel_peers jit`` after a run spares the next one that.
"""

from __future__ import annotations

import argparse
import io
import struct
import tarfile
import zipfile
from pathlib import Path

ARCHIVE = "peers.tar.xz"
COMPILED = "jit.t*"  # DeepGEMM's directory of compiled kernels from an earlier run, if it was kept
PYTHON = "cpython-312"  # whose DeepGEMM is packed; the others are for every CPython
MEMBERS = {
    "vllm/_flashmla_C.abi3.so": "flash_mla.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": "flash_attention_3.so",
    "vllm/_moe_C.abi3.so": "moe.so",
}
HOPPER = 90  # compute capability of the machine code that stays, times ten
_FATBIN, _MACHINE_CODE = b"\x50\xed\x55\xba", 2  # how a fat binary begins; a kind of its parts
DEEP_GEMM = "vllm/third_party/deep_gemm/"


def packed_name(name: str) -> str | None:
    """Where a file of the wheel goes, None for those that stay out."""
    if name.startswith(DEEP_GEMM) and (not name.endswith(".so") or PYTHON in name):
        return "deep_gemm/" + name.removeprefix(DEEP_GEMM)
    return MEMBERS.get(name)


def pack(wheel: Path, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ARCHIVE
    with zipfile.ZipFile(wheel) as source, tarfile.open(path, "w:xz", preset=6) as target:
        for name in source.namelist():
            if to := packed_name(name):
                data = source.read(name)
                data = for_hopper(data) if to.endswith(".so") else data
                member = tarfile.TarInfo(to)
                member.size = len(data)
                target.addfile(member, io.BytesIO(data))
    return path


def for_hopper(library: bytes) -> bytes:
    """The library with zeros, which pack well, in the place of other GPUs' machine code.

    Nothing moves. A fat binary is a header, then parts of a header (kind, header's size, bytes
    behind it, at 28 the GPU) and their bytes; the driver looks at headers to choose a part. PTX
    stays: the driver compiles it where a library has no machine code for the GPU.
    """
    data, begin = bytearray(library), 0
    while (begin := data.find(_FATBIN, begin)) >= 0:
        header, size = struct.unpack_from("<HQ", data, begin + 6)
        part, end = begin + header, begin + header + size
        begin += len(_FATBIN)
        if header != 16 or end > len(data):
            continue
        while part + 32 <= end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, part)
            (gpu,) = struct.unpack_from("<I", data, part + 28)
            if header < 32 or part + header + size > end:
                break
            if kind == _MACHINE_CODE and gpu != HOPPER:
                data[part + header : part + header + size] = bytes(size)
            part += header + size
    return bytes(data)


def unpack(directory: Path, to: Path) -> Path:
    """The unpacked files, which stay for the next run."""
    done = to / "unpacked"
    if not done.exists():
        to.mkdir(parents=True, exist_ok=True)
        for path in (directory / ARCHIVE, *directory.glob(COMPILED)):
            with tarfile.open(path) as archive:
                archive.extractall(to, filter="data")
        done.touch()
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack the peers out of vLLM's wheel.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(pack(arguments.wheel, arguments.directory))


if __name__ == "__main__":
    main()
