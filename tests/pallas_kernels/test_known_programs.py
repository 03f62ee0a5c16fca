"""Kernels whose lowered program is recorded are not compiled again; all others are."""

import json
import types

import jax
import pytest

from tests.pallas_kernels import known_programs, test_hopper_compile
from tests.pallas_kernels.known_programs import compilers, program_digest

needs_compiler = pytest.mark.skipif(
    bool(test_hopper_compile.reason_to_skip()), reason=str(test_hopper_compile.reason_to_skip())
)


@pytest.mark.parametrize(
    ("known", "op", "is_compiled"),
    [
        ({"kernel": {"program": "same", "spilled": 0}}, "mla_decode", False),
        ({"kernel": {"program": "other", "spilled": 0}}, "mla_decode", True),
        ({"other kernel": {"program": "same", "spilled": 0}}, "mla_decode", True),
        ({}, "mla_decode", True),
        # Unsigned maxima have not been counted.
        ({"kernel": {"program": "same", "spilled": 0}}, "route", True),
        ({"kernel": {"program": "same", "spilled": 0, "unsigned": 0}}, "route", False),
    ],
)
def test_only_a_recorded_program_is_not_compiled(known, op, is_compiled, tmp_path, monkeypatch):
    compiled = []
    lowered = types.SimpleNamespace(compile=lambda: compiled.append(True))
    kernel = test_hopper_compile.Kernel(f"pallas_kernels.{op}.mosaic_gpu", {}, {})
    topology = types.SimpleNamespace(devices=jax.devices()[:1])
    monkeypatch.setattr(test_hopper_compile, "KERNELS", {"kernel": kernel})
    monkeypatch.setattr(test_hopper_compile, "lower", lambda kernel, sharding: lowered)
    monkeypatch.setattr(test_hopper_compile, "program_digest", lambda lowered: "same")
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", lambda **_: topology)
    (tmp_path / "known.json").write_text(json.dumps(known))
    (result,) = test_hopper_compile.compile_all(op, tmp_path).values()
    assert bool(compiled) == is_compiled
    assert ("report" in result) == is_compiled


@pytest.mark.parametrize("changed", ["jaxlib", "ptxas", "options", "jax-cuda13-plugin"])
def test_other_compilers_know_no_program(changed, monkeypatch):
    monkeypatch.setattr(known_programs, "ptxas_version", lambda: "13.0.88")
    programs = {"kernel": {"program": "same", "spilled": 0}}
    recorded = {"compilers": compilers("--flag"), "programs": programs}
    assert known_programs.known_programs(recorded, "--flag") == programs
    recorded["compilers"] = {**recorded["compilers"], changed: "another"}
    assert known_programs.known_programs(recorded, "--flag") == {}


@needs_compiler
def test_a_digest_depends_on_the_kernel_and_its_arguments(monkeypatch):
    """Also on what is computed around the kernel, but not on the line of the source."""
    from pallas_kernels.rms_norm import mosaic_gpu

    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)

    def digest(function, D=2048):
        arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((1, D), (D,))]
        return program_digest(jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)))

    norm = mosaic_gpu.rms_norm
    here = digest(lambda x, weight: norm(x, weight, eps=1e-6))
    assert digest(lambda x, weight: norm(x, weight, eps=1e-6)) == here  # from another line
    assert digest(lambda x, weight: norm(x, weight, eps=1e-6), D=4096) != here
    assert digest(lambda x, weight: norm(x, weight, eps=1e-5)) != here
    assert digest(lambda x, weight: norm(x, weight, eps=1e-6) + 1) != here


def test_a_program_without_a_kernel_has_no_digest():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with pytest.raises(ValueError, match="expected a program with a Mosaic GPU kernel"):
        program_digest(lowered)
