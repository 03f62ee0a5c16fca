"""Runs modules of :mod:`pallas_kernels.decoder_layer` on NumPy, for 256 threads at once.

The interpreter has no threads, so it cannot run code that is inlined below Pallas. Here the
functions that emit instructions compute instead: a register is an array with one number per thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

THREADS, LANES = 256, 32


class Buffer:
    """Memory, and the shape of the reference to it."""

    def __init__(self, array: np.ndarray):
        self.bytes = np.frombuffer(array.tobytes(), np.uint8).copy()
        self.shape = array.shape


class Values:
    """An array in registers: one register with a few numbers per thread."""

    def __init__(self, *numbers: Any):
        self.numbers = [np.broadcast_to(n, (THREADS,)) for n in numbers]
        self.registers = np.empty(1, object)
        self.registers[0] = self

    def __getitem__(self, i: int) -> np.ndarray:
        return self.numbers[int(i)]


class Pointer:
    def __init__(self, memory: np.ndarray, offset: Any):
        self.memory, self.offset = memory, np.broadcast_to(offset, (THREADS,)).astype(np.int64)

    def words(self, count: int) -> list[np.ndarray]:
        assert not np.any(self.offset % (4 * count)), "a misaligned load"
        at = self.offset[:, None] + np.arange(4 * count)
        # Threads that a branch excludes may be past the end.
        loaded = self.memory[np.minimum(at, len(self.memory) - 1)]
        return list(np.ascontiguousarray(loaded).view(np.uint32).T)


class Branch:
    def __init__(self, condition: np.ndarray, _: Any, has_else: bool):
        assert has_else
        self.condition, self.then_block, self.else_block = condition, [], []

    @property
    def results(self) -> list[np.ndarray]:
        pairs = zip(self.then_block, self.else_block, strict=True)
        return [np.where(self.condition, a, b) for a, b in pairs]


def bfloat16_pair(words: np.ndarray) -> np.ndarray:
    """Returns the two bfloat16 of each word as float32, [..., 2]."""
    pairs = np.ascontiguousarray(words.astype(np.uint32)).view(ml_dtypes.bfloat16)
    return pairs.reshape(*words.shape, 2).astype(np.float32)


def float16_pair(words: np.ndarray) -> np.ndarray:
    pairs = np.ascontiguousarray(words.astype(np.uint32)).view(np.float16)
    return pairs.reshape(*words.shape, 2).astype(np.float32)


def mma(operands: tuple[Any, ...], pair: Any) -> list[np.ndarray]:
    """mma.sync m16n8k16 of 16-bit pairs: thread g * 4 + q has row g of A and D, column g of B."""
    sums, a, b = operands[:4], operands[4:8], operands[8:]
    results = [np.array(np.broadcast_to(s, (THREADS,)), np.float32) for s in sums]
    a, b = ([np.broadcast_to(x, (THREADS,)) for x in each] for each in (a, b))
    lane = np.arange(LANES)
    g, q = lane // 4, lane % 4
    for warp in range(THREADS // LANES):
        own = slice(warp * LANES, (warp + 1) * LANES)
        A, B = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        for n, (row, column) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            for e, values in enumerate(pair(a[n][own]).T):
                A[g + row, 2 * q + e + column] = values
        for n in range(2):
            for e, values in enumerate(pair(b[n][own]).T):
                B[2 * q + e + 8 * n, g] = values
        D = A @ B
        for n in range(4):
            results[n][own] += D[g + 8 * (n // 2), 2 * q + n % 2]
    return results


def unpack_float16(word: np.ndarray) -> list[np.ndarray]:
    """The instructions of ``_UNPACK_FLOAT8``: bytes 0 and 1, then 2 and 3."""
    four = np.ascontiguousarray(word.astype(np.uint32)).view(ml_dtypes.float8_e4m3fn)
    bits = four.reshape(*word.shape, 4).astype(np.float16).view(np.uint16).astype(np.uint32)
    return [bits[..., n] | bits[..., n + 1] << 16 for n in (0, 2)]


def run(text: str, operands: tuple[Any, ...]) -> Any:
    """Runs instructions on 32-bit words one by one. ``$0`` and so on are results, then operands."""
    lines = [line.strip() for line in text.strip("{}\n ").split(";")]
    lines = [line.split(None, 1) for line in lines if line and not line.startswith(".reg")]
    count = 1 + max(int(n) for n in re.findall(r"\$(\d+)", text)) - len(operands)
    words = {f"${count + n}": np.asarray(x).astype(np.uint32) for n, x in enumerate(operands)}

    def halves(name: str) -> np.ndarray:
        bits = np.ascontiguousarray(np.broadcast_to(word(name), (THREADS,)))
        return bits.view(np.float16).reshape(-1, 2)

    def word(name: str) -> Any:
        return words[name] if name in words else np.uint32(int(name, 0))

    for name, rest in lines:
        target, *sources = rest.split(", ")
        if name == "shr.u32":
            result = word(sources[0]) >> word(sources[1])
        elif name == "lop3.b32":
            assert sources[3] == "0x6A"  # (a & b) ^ c
            result = (word(sources[0]) & word(sources[1])) ^ word(sources[2])
        elif name == "xor.b32":
            result = word(sources[0]) ^ word(sources[1])
        elif name == "mov.b32":
            result = word(sources[0])
        elif name == "prmt.b32":
            a, b, selector = (word(source) for source in sources)
            of_bytes = [each >> (8 * i) & 255 for each in (a, b) for i in range(4)]
            chosen = [of_bytes[int(selector) >> (4 * i) & 7] << (8 * i) for i in range(4)]
            result = chosen[0] | chosen[1] | chosen[2] | chosen[3]
        elif name in ("sub.rn.f16x2", "fma.rn.f16x2"):
            a, b, *c = (halves(source).astype(np.float64) for source in sources)
            pair = a - b if name.startswith("sub") else a * b + c[0]
            result = pair.astype(np.float16).view(np.uint32).reshape(-1)
        else:
            raise AssertionError(f"an unknown instruction: {name}")
        words[target] = result
    return [words[f"${n}"] for n in range(count)]


def asm(text: str, _: str, *operands: Any, result: Any = None, effects: bool = False) -> Any:
    del result, effects
    if text.startswith("mma.sync.aligned.m16n8k16"):
        return mma(operands, float16_pair if "f16.f16" in text.split("f32.")[1] else bfloat16_pair)
    if "cvt.rn.f16x2.e4m3x2" in text:
        return unpack_float16(operands[0])
    if "sub.rn.f16x2" in text:
        return run(text, operands)
    if text.startswith("shfl.sync.idx.b32"):
        if "0x1C1F" in text:  # from one of four lanes
            quarter = int(text.split(", ")[2])
            return np.repeat(np.broadcast_to(operands[0], (THREADS,))[quarter::4], 4)
        value, lane = (np.broadcast_to(x, (THREADS,)) for x in operands)
        return value.reshape(-1, LANES)[np.arange(THREADS) // LANES, lane]
    raise AssertionError(f"an unknown instruction: {text}")


class Inline:
    def __init__(self, *_: Any, returns: Any = None):
        del returns

    def __call__(self, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            is_register = Buffer | Values | list
            wrapped = [x if isinstance(x, is_register) else Values(int(x)) for x in arguments]
            return function(*wrapped)

        return call

    def on(self, *arguments: Any) -> Any:
        return lambda function: self(function)(*arguments)


def load(type_: Any, pointer: Pointer, alignment: int | None = None) -> Any:
    del alignment
    if type_ == "f32":
        return pointer.words(1)[0].view(np.float32)
    return pointer.words(4)


def select(condition: np.ndarray, a: Any, b: Any) -> Any:
    if not isinstance(a, Pointer):
        return np.where(condition, a, b)
    offset = np.where(condition, a.offset, b.offset + len(a.memory))
    return Pointer(np.concatenate([a.memory, b.memory]), offset)


def store(value: Any, pointer: Pointer, alignment: int | None = None) -> None:
    numbers = value.numbers if isinstance(value, Values) else [value]
    stored = np.ascontiguousarray(np.stack(numbers, axis=-1)).view(np.uint8)
    assert not np.any(pointer.offset % (alignment or 1)), "a misaligned store"
    pointer.memory[pointer.offset[:, None] + np.arange(stored.shape[1])] = stored


def emulate(monkeypatch: Any, *modules: Any) -> None:
    """Replaces what the modules emit instructions with."""
    size = {"f32": 4, "f16": 2, "i8": 1}
    block: list[list[Any]] = []

    @contextlib.contextmanager
    def insertion_point(target: list[Any]) -> Iterator[None]:
        block.append(target)
        yield
        block.pop()

    compare = {"ult": np.less, "uge": np.greater_equal}
    thread = np.arange(THREADS)
    fakes: dict[str, Any] = {
        "arith": SimpleNamespace(
            addi=np.add, subi=np.subtract, muli=np.multiply, divui=np.floor_divide,
            andi=np.bitwise_and, shrui=np.right_shift, minui=np.minimum, addf=np.add,
            mulf=np.multiply, select=select,
            CmpIPredicate=SimpleNamespace(ult="ult", uge="uge"),
            cmpi=lambda predicate, a, b: compare[predicate](a, b),
        ),
        "llvm": SimpleNamespace(
            load=load, store=store, extractelement=lambda vector, i: vector[int(i)],
            extractvalue=lambda _, struct, i: struct[i[0]],
            intr_fma=lambda a, b, c: np.float32(a) * np.float32(b) + c,
            StructType=SimpleNamespace(get_literal=lambda _: None),
        ),
        "mgpu": SimpleNamespace(
            utils=SimpleNamespace(
                thread_idx=lambda: thread,
                warp_idx=lambda: thread // LANES,
                memref_ptr=lambda buffer: Pointer(buffer.bytes, 0),
            )
        ),
        "element": lambda pointer, index, type_: Pointer(
            pointer.memory, pointer.offset + index * size[type_]
        ),
        "ir": SimpleNamespace(
            F16Type=SimpleNamespace(get=lambda: "f16"),
            DenseI64ArrayAttr=SimpleNamespace(get=list),
            IntegerType=SimpleNamespace(get_signless=lambda bits: f"i{bits}"),
            VectorType=SimpleNamespace(get=lambda shape, _: shape),
            InsertionPoint=insertion_point,
        ),
        "scf": SimpleNamespace(IfOp=Branch, yield_=lambda values: block[-1].extend(values)),
        "vector": SimpleNamespace(
            shuffle=lambda a, _, mask: Values(*(a[n] for n in mask)),
        ),
        "array": lambda registers, shape, layout: registers[0],
        "only": lambda values: values[0],
        "per_thread": Values,
        "numbers_of": lambda values: values.numbers,
        "float_pair": Values,
        "item": lambda register, i: register[i],
        "register": lambda scalar: scalar[0],
        "const": np.int64,
        "float_const": np.float32,
        "i32": lambda: "i32",
        "f32": lambda: "f32",
        "asm": asm,
        "asm_numbers": lambda text, kinds, *operands, **_: asm(text, kinds, *operands),
        "inline": Inline,
    }  # fmt: skip
    for module in modules:
        for name, fake in fakes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fake)
