"""Peak memory of a traced training step: each array, from its first operation to its last reader.

XLA does not write every array of a jaxpr to memory. :func:`peak` assumes what its compilers do:

1. An elementwise operation is fused into its readers. Its result is written only if a matmul, a
   kernel or a loop reads it, or if it has several readers and its sources are larger than itself.
2. A matmul whose only reader is a conversion writes the converted result.
3. Reshapes write nothing, and neither do transposes that only matmuls read.
4. Copies of arguments, such as weights in another dtype, are made before their first reader.
5. An elementwise operation, scatter or loop overwrites an array of the same size that has no later
   reader. A result with the shape of a donated argument overwrites the argument.

Operations run in the order of the jaxpr. The compiler's packing of arrays is not modelled.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

_FUSED = frozenset(
    (
        *("abs", "add", "add_any", "and", "atan2", "broadcast_in_dim", "ceil", "clamp"),
        *("concatenate", "convert_element_type", "cos", "div", "dynamic_slice", "eq", "erf"),
        *("exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le"),
        *("log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not"),
        *("or", "pad", "pow", "real", "rem", "rev", "round", "rsqrt", "select_n", "shift_left"),
        *("shift_right_arithmetic", "shift_right_logical", "sign", "sin", "slice", "split"),
        *("sqrt", "square", "stack", "sub", "tan", "tanh", "transpose", "xor"),
    )
)
_RENAMED = frozenset(
    (
        *("bitcast_convert_type", "copy", "copy_p", "expand_dims", "mesh_cast", "name", "pvary"),
        *("reduce_precision", "reshape", "reshard", "sharding_constraint", "squeeze"),
        # A kernel overwrites what a reference was made from.
        *("get", "new_ref", "stop_gradient"),
    )
)
_REDUCTIONS = frozenset(
    (
        *("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or"),
        *("reduce_prod", "reduce_sum"),
    )
)
_IN_PLACE = frozenset(["dynamic_update_slice", "scatter", "scatter-add", "scatter_add"])
_INLINING = _FUSED | _REDUCTIONS | _IN_PLACE | {"gather", "vector_product"}
"""Operations that compute fused inputs as they read them."""
_CALLS = frozenset(
    (
        *("checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit"),
        *("pjit", "remat", "remat2", "shard_map"),
    )
)
_SCALARS = 4096  # bytes; smaller arrays are not followed


@dataclasses.dataclass(eq=False)
class Array:
    """An array of the program, on one device."""

    nbytes: int
    shape: tuple[int, ...]
    made_by: str
    """Name of the operation that makes it, or of the argument."""
    depends_on: frozenset[str]
    """Names of the arguments that it depends on."""
    is_argument: bool = False
    is_fused: bool = False
    """Whether it is computed inside of the operations that read it, and not written."""
    sources: tuple[Array, ...] = ()
    """The written arrays that a fused array is computed from."""
    shards: float = 1.0
    """Number of devices that have a part of it each."""
    readers: list[str] = dataclasses.field(default_factory=list)
    begin: int = 0
    """Number of the operation that writes it."""
    end: int = -1
    """Number of the last operation that reads it."""
    is_saved: bool = False
    """Whether it is written before the first gradient and read after it."""


@dataclasses.dataclass
class _Operation:
    name: str
    inputs: list[Array]
    outputs: list[Array]
    inside: Peak | None = None
    """Peak of the body of a loop, without its inputs and outputs."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """The operation of a program during which memory use is highest, without arguments."""

    nbytes: int = 0
    arrays: tuple[Array, ...] = ()
    """Arrays in memory during that operation. Their sum can exceed ``nbytes``, because results may
    overwrite arrays."""


def peak(
    program: core.ClosedJaxpr,
    names: Sequence[str],
    shards: Sequence[float],
    parameters: Collection[tuple[int, ...]],
) -> Peak:
    """Returns the peak memory of one device.

    Args:
      names: name of each argument. Arrays record the names that they depend on.
      shards: number of devices that each argument is split over.
      parameters: shapes of the parameters. The first array of such a shape that depends on
        ``"tokens"`` is the first gradient.
    """
    arguments = [
        _array(var.aval, name, frozenset((name,)), parts, is_argument=True)
        for var, name, parts in zip(program.jaxpr.invars, names, shards, strict=True)
    ]
    # As XLA does: gradients of frozen weights are not computed, for example.
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)
    return _peak(jaxpr, arguments, parameters)


def _array(aval: Any, made_by: str, depends_on: frozenset[str], shards: float = 1.0, **more: Any):
    itemsize = getattr(aval.dtype, "itemsize", 0)
    nbytes = round(math.prod(aval.shape) * itemsize / shards)
    return Array(nbytes, aval.shape, made_by, depends_on, shards=shards, **more)


def _constants(jaxpr: Any) -> list[Array]:
    return [_array(v.aval, "constant", frozenset(), is_argument=True) for v in jaxpr.constvars]


def _peak(
    jaxpr: Any,
    arguments: list[Array],
    parameters: Collection[tuple[int, ...]],
    is_local: bool = False,
) -> Peak:
    program = _Program(parameters, is_local)
    results = program.add(jaxpr, [*_constants(jaxpr), *arguments])
    program.decide(results)
    return program.peak(arguments, results)


def _name(equation: Any) -> str:
    """Returns the name of an operation. XLA multiplies and sums a matmul by vectors itself."""
    name = equation.primitive.name
    if name == "dot_general":
        contracted, batched = equation.params["dimension_numbers"]
        for var, dimensions, batch in zip(equation.invars, contracted, batched, strict=True):
            if len(dimensions) + len(batch) == len(var.aval.shape):
                return "vector_product"
    return name


class _Program:
    """The operations of a jaxpr, those of calls included."""

    def __init__(self, parameters: Collection[tuple[int, ...]], is_local: bool) -> None:
        self.operations: list[_Operation] = []
        self._readers: dict[int, list[_Operation]] = {}  # by the array's id
        self._before_results: set[int] = set()
        self._parameters = parameters
        # Whether the shapes are those of one device, as inside shard_map.
        self._is_local = is_local

    def add(self, jaxpr: Any, inputs: Sequence[Array]) -> list[Array]:
        """Appends the operations of a jaxpr and returns its results."""
        arrays: dict[Any, Array] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

        def read(atom: Any) -> Array:
            if isinstance(atom, core.Literal):
                return _array(atom.aval, "literal", frozenset(), is_argument=True)
            return arrays[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            results = self._equation(equation, operands)
            arrays.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, operands: list[Array]) -> list[Array]:
        name = _name(equation)
        if name in _CALLS:
            return self._call(equation, operands)
        if name == "optimization_barrier":
            self._append(name, operands, [])
            return operands
        depends_on = frozenset[str]().union(*(each.depends_on for each in operands))
        # As XLA propagates shardings: what is computed from a sharded array is sharded, too.
        parts = max((each.shards for each in operands), default=1.0)
        parts = 1.0 if self._is_local else parts
        results = [_array(var.aval, name, depends_on, parts) for var in equation.outvars]
        if name in _RENAMED and len(results) == 1 and results[0].nbytes == operands[0].nbytes:
            return operands[:1]
        inside = None
        if name in ("scan", "while", "cond"):
            inside = self._loop(equation, operands)
        self._append(name, operands, results, inside)
        return results

    def _append(
        self, name: str, inputs: list[Array], outputs: list[Array], inside: Peak | None = None
    ) -> None:
        self.operations.append(_Operation(name, inputs, outputs, inside))
        for array in inputs:
            array.readers.append(name)

    def _call(self, equation: Any, operands: list[Array]) -> list[Array]:
        name, params = equation.primitive.name, equation.params
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if name in ("checkpoint", "remat", "remat2") and params.get("prevent_cse", True):
            self._append("optimization_barrier", operands, [])
        outside = self._is_local
        self._is_local = outside or name == "shard_map"
        results = self.add(inner, [*_constants(inner), *operands])
        self._is_local = outside
        if name == "shard_map":
            for var, result in zip(equation.outvars, results, strict=True):
                whole = math.prod(var.aval.shape) * var.aval.dtype.itemsize
                result.shards = max(whole / max(result.nbytes, 1), 1.0)
        return results

    def _loop(self, equation: Any, operands: list[Array]) -> Peak:
        """Returns the peak of a loop's body, or of the branch of a conditional that needs most."""
        params = equation.params
        if equation.primitive.name == "cond":
            bodies, skipped = params["branches"], 1
        elif equation.primitive.name == "scan":
            bodies, skipped = [params["jaxpr"]], 0
        else:
            bodies, skipped = [params["body_jaxpr"]], params["cond_nconsts"]
        shapes = [atom.aval.shape for atom in equation.invars]
        peaks = []
        for body in bodies:
            arguments = []
            values = zip(body.jaxpr.invars, operands[skipped:], shapes[skipped:], strict=True)
            for var, value, shape in values:
                is_slice = var.aval.shape != shape  # the loop copies its slices
                shards = 1.0 if self._is_local else value.shards
                arguments.append(
                    _array(
                        var.aval, value.made_by, value.depends_on, shards, is_argument=not is_slice
                    )
                )
            peaks.append(_peak(body.jaxpr, arguments, self._parameters, self._is_local))
        return max(peaks, key=lambda each: each.nbytes)

    def decide(self, results: Sequence[Array]) -> None:
        """Decides which arrays are written, and finds when each is first and last needed."""
        for array in results:
            array.readers.append("result")
        self._readers = self._operations_by_operand()
        self._round_matmuls()
        self._before_results = self._find_before_results(results)
        for number, operation in enumerate(self.operations):
            for array in operation.outputs:
                self._decide(array, operation, number)
        last = len(self.operations)
        for number, operation in enumerate(self.operations):
            is_fused = operation.name in _FUSED
            if is_fused and all(each.is_fused for each in operation.outputs):
                continue  # its readers read its sources
            for array in operation.inputs:
                self._read(array, number)
        for array in results:
            self._read(array, last)
        first_gradient = next(
            (
                n
                for n, each in enumerate(self.operations)
                if any(map(self.is_gradient, each.outputs))
            ),
            last,
        )
        for operation in self.operations:
            for array in operation.outputs:
                array.is_saved = array.begin < first_gradient <= array.end < last

    def is_gradient(self, array: Array) -> bool:
        """Returns whether a written array has the shape of a matrix parameter and depends on
        tokens."""
        is_matrix = len(array.shape) > 1 and array.shape in self._parameters and not array.is_fused
        return is_matrix and "tokens" in array.depends_on

    def _operations_by_operand(self) -> dict[int, list[_Operation]]:
        readers: dict[int, list[_Operation]] = defaultdict(list)
        for operation in self.operations:
            for array in operation.inputs:
                readers[id(array)].append(operation)
        return readers

    def _find_before_results(self, results: Sequence[Array]) -> set[int]:
        """Returns the ids of the results, and of arrays from which only results are computed by
        elementwise operations. XLA computes results of one array in one loop."""
        ids = {id(array) for array in results}
        for operation in reversed(self.operations):
            for array in operation.outputs:
                following = self._readers[id(array)]
                if following and all(
                    each.name in _FUSED and all(id(output) in ids for output in each.outputs)
                    for each in following
                ):
                    ids.add(id(array))
        return ids

    def _round_matmuls(self) -> None:
        for operation in self.operations:
            if operation.name != "dot_general":
                continue
            (array,) = operation.outputs
            following = self._readers[id(array)]
            if [each.name for each in following] == ["convert_element_type"]:
                array.nbytes = min(array.nbytes, following[0].outputs[0].nbytes)

    def _decide(self, array: Array, operation: _Operation, number: int) -> None:
        array.begin = number
        if operation.name not in _FUSED:
            return
        sources = dict.fromkeys(
            source
            for each in operation.inputs
            for source in (each.sources if each.is_fused else (each,))
            if source.nbytes > _SCALARS
        )
        array.sources = tuple(sources)
        kinds = set(array.readers)
        if operation.name == "transpose" and kinds <= {"dot_general"}:
            array.is_fused = True
            return
        is_needed = bool(kinds - _INLINING)
        size = sum(each.nbytes for each in sources)
        is_shared = len(array.readers) > 1 and size > 1.25 * array.nbytes
        is_shared &= id(array) not in self._before_results
        array.is_fused = not (is_needed or is_shared)
        if not array.is_fused and all(each.is_argument for each in sources):
            array.begin = -1  # at its first use

    def _read(self, array: Array, number: int) -> None:
        for each in array.sources if array.is_fused else (array,):
            each.end = max(each.end, number)
            if each.begin == -1:
                each.begin = number

    def peak(self, arguments: Sequence[Array], results: Sequence[Array]) -> Peak:
        """Returns the peak. Results that have the shape of an argument overwrite it."""
        donated = Counter((each.shape, each.nbytes) for each in arguments if each.is_argument)
        in_place: set[int] = set()
        for array in dict.fromkeys(results):
            key = array.shape, array.nbytes
            if donated[key] and not array.is_argument:
                donated[key] -= 1
                in_place.add(id(array))
        starts: dict[int, list[Array]] = defaultdict(list)
        ends: dict[int, list[Array]] = defaultdict(list)
        seen = dict.fromkeys(
            [
                *(each for each in arguments if not each.is_argument),
                *(each for operation in self.operations for each in operation.outputs),
            ]
        )
        for array in seen:
            if array.is_fused or array.end < 0 or id(array) in in_place:
                continue
            starts[max(array.begin, 0)].append(array)
            ends[max(array.end, array.begin)].append(array)
        live: dict[int, Array] = {}
        total, best = 0, Peak()
        for number, operation in enumerate(self.operations):
            new = starts[number]
            reused = self._reused(operation, new, ends[number])
            total += sum(each.nbytes for each in new)
            live.update((id(each), each) for each in new)
            inside = operation.inside
            needed = total - reused + (inside.nbytes if inside else 0)
            if needed > best.nbytes:
                arrays = (*live.values(), *(inside.arrays if inside else ()))
                best = Peak(needed, arrays)
            for array in ends[number]:
                if live.pop(id(array), None) is not None:
                    total -= array.nbytes
        return best

    def _reused(self, operation: _Operation, new: list[Array], ending: list[Array]) -> int:
        """Returns the bytes of new arrays that are written over arrays that end."""
        may_reuse = operation.name in _FUSED | _IN_PLACE or operation.inside is not None
        if not may_reuse:
            return 0
        free = Counter(each.nbytes for each in ending if each not in operation.outputs)
        reused = 0
        for array in new:
            if free[array.nbytes]:
                free[array.nbytes] -= 1
                reused += array.nbytes
        return reused
