"""Packs the peer kernels of the benchmark from vLLM's wheel into one archive.

    pip download --no-deps vllm==0.22.0 && python -m benchmarks.kernels.pack_peers vllm-*.whl DIR

DIR/peers.tar.xz then contains the extension modules of FlashMLA, FlashAttention-3 and Marlin,
without the code for other GPUs than Hopper, and DeepGEMM with the headers that it compiles: 27 MB
of the wheel's 260 MB. The wheel itself need not be installed.
DeepGEMM takes about ten seconds to compile the kernel of a shape. ``tar cf DIR/jit.tar -C
/tmp/dsv3_kernel_peers jit`` after a run saves its compiled kernels for the next run.
"""

from __future__ import annotations

import argparse
import io
import struct
import tarfile
import zipfile
from pathlib import Path

ARCHIVE = "peers.tar.xz"
COMPILED = "jit.t*"  # DeepGEMM's compiled kernels of an earlier run, if they were saved
PYTHON = "cpython-312"  # for DeepGEMM; the other modules work with every CPython
MEMBERS = {
    "vllm/_flashmla_C.abi3.so": "flash_mla.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": "flash_attention_3.so",
    "vllm/_moe_C.abi3.so": "moe.so",
}
HOPPER = 90  # compute capability of the machine code to keep, times ten
_FATBIN, _MACHINE_CODE = b"\x50\xed\x55\xba", 2  # magic number of a fat binary; kind of a section
DEEP_GEMM = "vllm/third_party/deep_gemm/"


def packed_name(name: str) -> str | None:
    """Returns the archive name of a file of the wheel, or None to leave it out."""
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
    """Overwrites the machine code for other GPUs with zeros, which compress well.

    All offsets stay the same. A fat binary is a header followed by sections. A section has a header
    (kind, header size, payload size; the GPU at offset 28) and a payload. The driver chooses a
    section by its header. PTX is kept, because the driver compiles it if a library has no machine
    code for the GPU.
    """
    data, begin = bytearray(library), 0
    while (begin := data.find(_FATBIN, begin)) >= 0:
        header, size = struct.unpack_from("<HQ", data, begin + 6)
        section, end = begin + header, begin + header + size
        begin += len(_FATBIN)
        if header != 16 or end > len(data):
            continue
        while section + 32 <= end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, section)
            (gpu,) = struct.unpack_from("<I", data, section + 28)
            if header < 32 or section + header + size > end:
                break
            if kind == _MACHINE_CODE and gpu != HOPPER:
                data[section + header : section + header + size] = bytes(size)
            section += header + size
    return bytes(data)


def unpack(directory: Path, to: Path) -> Path:
    """Unpacks the archives, unless an earlier run has done so, and returns the directory."""
    done = to / "unpacked"
    if not done.exists():
        to.mkdir(parents=True, exist_ok=True)
        for path in (directory / ARCHIVE, *directory.glob(COMPILED)):
            with tarfile.open(path) as archive:
                archive.extractall(to, filter="data")
        done.touch()
    return to


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack the peer kernels from vLLM's wheel.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(pack(arguments.wheel, arguments.directory))


if __name__ == "__main__":
    main()
