"""Compiles the programs of a Generator, an Engine or a Trainer for a target, without its devices,
and reads their memory use from the compiler."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx

from dsv3_jax import compile_cache
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.device.step_input import StepOptions
from dsv3_jax.generation.drafters import DraftPlan, MTPDrafter
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.layers.on_mesh import stored_shardings
from dsv3_jax.layers.paged_cache import PAGE_AXES
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.pace import chunked_buckets
from dsv3_jax.plan import engine_state
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.estimate import model_shapes
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.topology import topology
from dsv3_jax.plan.training import TrainingPlan
from sharding import Layout, make_layout

Phase = Literal["decode", "prefill"]

Compilation = Callable[[], jax.stages.Compiled]
"""Compiles a program that has been lowered."""

_KERNEL = re.compile(r'%([\w-]+?)(?:\.\d+)? = .*custom_call_target="(?:tpu_custom_call|mosaic_gpu)')
_UNNAMED = "mpmd_map"  # the name of every Mosaic GPU call


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """The compiler's figures for one program on one device."""

    arguments: int
    """Bytes of weights and state as the compiler lays them out, whether the program reads them or
    not."""
    workspace: int
    """Bytes of temporary arrays, and of results that do not overwrite the state."""
    reused: int
    """Bytes of the state that the results overwrite. The cache is among them, unless the program
    copies it."""
    kernels: dict[str, int]
    """Number of calls of each Pallas kernel in the program. All Mosaic GPU kernels count as
    ``mosaic_gpu``."""
    seconds: float
    """Time to lower and compile."""

    @property
    def peak(self) -> int:
        """Memory use, in bytes."""
        return self.arguments + self.workspace


def compile_program(deployment: Deployment, phase: Phase) -> CompiledProgram:
    """Compiles the program of a decode step, or of a prefill.

    A Generator's prefill has a chunk of all sequences. An Engine's is its largest step: all chunks,
    and a token of every sequence. Decode steps run several times in one dispatch. Programs have
    every layer of the model.

    Raises:
      ValueError: the compiler for the target is not installed, or it reports that the program does
        not fit.
    """
    layout = make_layout(
        deployment.layout_name,
        devices=topology(deployment.target),
        exchange=deployment.exchange,
        float8_dispatch=deployment.float8_dispatch,
    )
    # The parts outside of shard_map must be traced for the devices of the mesh too.
    with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
        return _compile_for(layout, deployment, phase)


def _compile_for(layout: Layout, deployment: Deployment, phase: Phase) -> CompiledProgram:
    began = time.perf_counter()
    executable = _compile(_lower(layout, deployment, phase), deployment.target)
    return _figures(executable, began)


def compile_step(plan: TrainingPlan) -> CompiledProgram:
    """Compiles a training step.

    Raises:
      ValueError: as :func:`compile_program`.
    """
    began = time.perf_counter()
    lowered = plan.lower(topology(plan.target))
    return _figures(_compile(lowered.compile, plan.target), began)


def _figures(executable: jax.stages.Compiled, began: float) -> CompiledProgram:
    memory: Any = executable.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return CompiledProgram(
        arguments=memory.argument_size_in_bytes,
        workspace=memory.temp_size_in_bytes + results,
        reused=memory.alias_size_in_bytes,
        kernels=_kernels(executable.as_text() or ""),
        seconds=time.perf_counter() - began,
    )


def _lower(layout: Layout, deployment: Deployment, phase: Phase) -> Compilation:
    """Lowers a program."""
    decodes = deployment.batch // layout.num_shards("batch")
    default = engine_state.default_buckets(deployment.target, deployment.layout_name, decodes)
    if deployment.engine is None:
        buckets = chunked_buckets(default, decodes, deployment.chunk_tokens)
    else:
        buckets = dataclasses.replace(
            default,
            decodes=(decodes,),
            chunks=(deployment.engine.chunks,),
            chunk_tokens=deployment.chunk_tokens,
            chunk_form=deployment.engine.chunk_form,
            multi_step_decodes=None,
        )
    programs = Programs(
        _model(deployment, layout),
        buckets,
        DraftPlan(MTPDrafter() if deployment.mtp else None, (deployment.draft_depth,)),
        num_slots=deployment.batch,
        max_len=deployment.max_len,
        page_size=DEFAULT_PAGE_SIZE,
        vocab_size=deployment.config.vocab_size,
    )
    shard = model_shapes(deployment).shard(deployment.layout)
    pages = engine_state.local_pages(shard, deployment) * layout.num_shards(PAGE_AXES[0])
    is_prefill = phase == "prefill"
    shape = programs.shape(
        0 if is_prefill and buckets.separate else decodes,
        buckets.chunks[-1] if is_prefill else 0,
        StepOptions(sampling="sampled"),
    )
    lowered = programs.lower(*programs.state_shapes(pages), shape, keep_unused=True)
    return functools.partial(programs.compile, lowered, shape)


def _model(deployment: Deployment, layout: Layout) -> DeepSeekV3:
    """Returns a model of shapes with the layout's shardings."""
    model = model_shapes(deployment).model
    if deployment.activations:
        model.use_float8_activations()
    if deployment.cache_dtype is not None:
        model.use_cache_dtype(deployment.cache_dtype)
    model.lay_out(layout)
    sharding_of = stored_shardings(model, layout)
    graph, state = nnx.split(model)
    leaves = [
        (
            path,
            leaf.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of[path])),
        )
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def _compile(compilation: Compilation, target: Target) -> jax.stages.Compiled:
    try:
        # The cache cannot load a program whose device is missing.
        with compile_cache.disabled():
            return compilation()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ValueError(
            f"{target.name}: the compiler reports that the program does not fit: {first_line}"
        ) from None


def _kernels(program: str) -> dict[str, int]:
    """Counts the calls of Pallas kernels in a program's HLO text, by name."""
    names = _KERNEL.findall(program)
    counts = Counter("mosaic_gpu" if name == _UNNAMED else name for name in names)
    return dict(sorted(counts.items()))
