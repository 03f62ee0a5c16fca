"""Logits of a store compared with those of its source, on one device and on eight.

`test_sharded_load.py`, in the quick suite, compares the weights bit for bit.
"""

import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.export import export
from sharding import make_mesh
from tests.parity import test_transformers as parity
from tests.support.oracle import relative_error
from tests.support.running import forward

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(3).integers(0, 160, (8, 7))
MESH = {"expert": 4, "data": 2}


def same_logits(store, source, mesh=None, **options):
    """Expects equal bits on the same devices, because the weights are equal."""
    one, other = (
        forward(dsv3_jax.load(path, dtype="float32", mesh=mesh, **options)[0], TOKENS)
        for path in (store, source)
    )
    np.testing.assert_array_equal(one[0], other[0])
    for ours, theirs in zip(one[1].mtp_logits, other[1].mtp_logits, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return np.asarray(one[0])


@pytest.mark.parametrize(
    ("quantization", "mesh"), [("fp8", {"expert": 8}), (None, {"expert": 4, "tensor": 2})]
)
def test_the_demo(tmp_path, quantization, mesh):
    convert("demo", tmp_path / "store")
    alone = same_logits(tmp_path / "store", "demo", quantization=quantization)
    mesh = make_mesh(**mesh)
    spread = same_logits(tmp_path / "store", "demo", mesh, quantization=quantization)
    assert relative_error(spread, alone) < 1e-5


@pytest.mark.parity
def test_a_checkpoint_of_transformers(tmp_path):
    """A model saved by transformers is converted, loaded, exported, and read by it again."""
    import torch
    from transformers import AutoModelForCausalLM

    settings = dict(zip(parity.SETTINGS, parity.CASES[2], strict=True))
    theirs = parity.random_model(parity.hugging_face_config(**settings)).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "store", "bf16")
    alone = same_logits(tmp_path / "store", tmp_path / "hf")
    spread = same_logits(tmp_path / "store", tmp_path / "hf", make_mesh(**MESH))
    assert relative_error(spread, alone) < 1e-5
    exported = export(tmp_path / "store", tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", dtype=torch.float32, experts_implementation="eager"
    )
    assert relative_error(alone, parity.their_logits(again.eval(), TOKENS)) < parity.BOUND
    assert exported.verbatim


@pytest.mark.parity
@pytest.mark.parametrize("to", ["fp8", "int8", "int4"])
def test_transformers_computes_an_exported_store(tmp_path, checkpoint, to):
    """A float8 checkpoint becomes a store of any form, and is exported as bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    directory, _ = checkpoint(dtype="fp8", shards=3, scales_in_other_shard=True)
    convert(directory, tmp_path / "store", to)
    export(tmp_path / "store", tmp_path / "hf", "bf16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    ours, _ = dsv3_jax.load(tmp_path / "hf", dtype="float32")
    assert relative_error(forward(ours, TOKENS)[0], parity.their_logits(theirs, TOKENS)) < 1e-5
