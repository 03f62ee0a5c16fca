"""Compiles the programs of a Generator or an Engine for a target, without its devices, and reads
their memory use from the compiler."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from dsv3_jax.engine import programs as engine
from dsv3_jax.generation import programs as generator
from dsv3_jax.generation.drafters import MTPDrafter
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.layers.on_mesh import stored_shardings
from dsv3_jax.layers.paged_cache import PAGE_AXES
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.plan import engine_state
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.estimate import model_shapes
from dsv3_jax.plan.topology import topology
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
    and a token of every sequence; its decode step runs several times in one dispatch. Programs have
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
    lower = _loop if deployment.engine is None else _step
    executable = _compile(lower(layout, deployment, phase), deployment)
    memory: Any = executable.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return CompiledProgram(
        arguments=memory.argument_size_in_bytes,
        workspace=memory.temp_size_in_bytes + results,
        reused=memory.alias_size_in_bytes,
        kernels=_kernels(executable.as_text() or ""),
        seconds=time.perf_counter() - began,
    )


def _loop(layout: Layout, deployment: Deployment, phase: Phase) -> Compilation:
    """Lowers a program of the Generator."""
    programs = generator.Programs.of(
        _model(deployment, layout),
        deployment.max_len,
        prefill_chunk=deployment.chunk_tokens,
        vocab_size=deployment.config.vocab_size,
    )
    program = getattr(programs, phase)
    state_leaves, structure = programs.state_shapes(
        deployment.batch, depth=deployment.draft_depth, mtp=deployment.mtp
    )
    drafter = MTPDrafter() if deployment.mtp else None
    arguments, static = (np.int32(1),), (drafter,)
    if phase == "decode":
        arguments = Sampling.pack(seed=np.arange(deployment.batch)), np.int32(1)
        static = (drafter, deployment.draft_depth)
    lowered = program.lower(state_leaves, structure, *arguments, static=static, keep_unused=True)
    return functools.partial(lowered.compile, {**program.options})


def _step(layout: Layout, deployment: Deployment, phase: Phase) -> Compilation:
    """Lowers a step of the Engine."""
    assert deployment.engine is not None
    decodes = deployment.batch // layout.num_shards("batch")
    chunks = deployment.engine.chunks
    buckets = engine_state.default_buckets(deployment.target, deployment.layout_name, decodes)
    programs = engine.Programs(
        _model(deployment, layout),
        dataclasses.replace(
            buckets,
            decodes=(decodes,),
            chunks=(chunks,),
            chunk_tokens=deployment.chunk_tokens,
            chunk_form=deployment.engine.chunk_form,
            multi_step_decodes=None,
        ),
        num_slots=deployment.batch,
        max_len=deployment.max_len,
        page_size=DEFAULT_PAGE_SIZE,
        drafter=MTPDrafter() if deployment.mtp else None,
        depth=deployment.draft_depth,
        vocab_size=deployment.config.vocab_size,
    )
    shard = model_shapes(deployment).shard(deployment.layout)
    pages = engine_state.local_pages(shard, deployment) * layout.num_shards(PAGE_AXES[0])
    shape = programs.shape(
        decodes,
        chunks if phase == "prefill" else 0,
        steps=buckets.max_steps,
        sampling="sampled",
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


def _compile(compilation: Compilation, deployment: Deployment) -> jax.stages.Compiled:
    # Without the compilation cache, which cannot load a program whose device is missing.
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    try:
        return compilation()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ValueError(
            f"{deployment.target.name}: the compiler reports that the program does not fit:"
            f" {first_line}"
        ) from None
    finally:
        jax.config.update(name, before)


def _kernels(program: str) -> dict[str, int]:
    """Counts the calls of Pallas kernels in a program's HLO text, by name."""
    names = _KERNEL.findall(program)
    counts = Counter("mosaic_gpu" if name == _UNNAMED else name for name in names)
    return dict(sorted(counts.items()))
