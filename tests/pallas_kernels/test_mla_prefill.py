"""mla_prefill's back-ends, called through the public function, and its gradient."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla_prefill, target
from pallas_kernels.mla_prefill import blocked, cudnn, mosaic_gpu, mosaic_gpu_gradient
from pallas_kernels.mla_prefill.gradients import differentiable
from tests.pallas_kernels.machine import off_gpu, on_gpu
from tests.pallas_kernels.mla_prefill_cases import (
    Inputs,
    MlaPrefillCases,
    MlaPrefillDocumentCases,
    MlaPrefillFloat32GradientCases,
    check_gradients,
    documents,
    run,
)
from tests.pallas_kernels.numerics import check, largest_intermediate, tolerance


class TestReference(MlaPrefillCases, MlaPrefillFloat32GradientCases, MlaPrefillDocumentCases):
    implementation = "reference"


def by_blocks(*arrays, scale):
    """The blocked back-end, for any number of tokens."""
    return differentiable(functools.partial(blocked.attend, scale=scale), scale=scale)(*arrays)


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of 8 queries and keys."""
    monkeypatch.setattr(blocked, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(blocked, "SHORTEST_BLOCK", 8)


@pytest.mark.usefixtures("short_blocks")
class TestBlocked(MlaPrefillCases, MlaPrefillFloat32GradientCases, MlaPrefillDocumentCases):
    implementation = staticmethod(by_blocks)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_gradients_of_several_blocks(self, dtype):
        """A prompt, a chunk after cached tokens, a prefix, queries before the keys, no keys."""
        starts, lengths = (0, 6, 29, -9, 0), (21, 27, 11, 29, 0)
        x = self.random(starts, lengths, T=21, S=29, dtype=dtype)
        check_gradients(by_blocks, x)
        check_gradients(by_blocks, x, of_lse=False)


def test_default():
    """The default is bit for bit the only back-end that takes float32 and few tokens."""
    x = Inputs.random((0, 2), (9, 6), T=9, S=9, widths=(24, 16), scale=0.2)
    got = jax.jit(functools.partial(mla_prefill, scale=x.scale))(*x.arrays())
    for a, b in zip(got, run(x, "reference"), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("short_blocks")
def test_without_starts_and_lengths():
    x = Inputs.random((0, 0), (21, 21), T=21, S=21, widths=(24, 16))
    for implementation in ("reference", "blocked"):
        attend = functools.partial(mla_prefill, scale=x.scale, implementation=implementation)
        for a, b in zip(attend(*x.arrays()[:3]), run(x, implementation), strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)


@pytest.mark.usefixtures("short_blocks")
def test_blocks_before_a_document_are_skipped():
    """NaN there reaches no result and no gradient: 0 * NaN would be NaN."""
    x = Inputs.random((0,), (32,), T=32, S=32, widths=(8, 8))
    q, k, v, *_ = x.arrays()
    # The blocks of 8 queries see the blocks of 8 keys 0, 0 and 1, 2, 2 and 3.
    first_keys = jnp.asarray([documents(5, 11, total=32)], jnp.int32)
    k, v = k.at[:, :16].set(jnp.nan), v.at[:, :16].set(jnp.nan)

    def loss(q, k, v):
        out, _ = by_blocks(q, k, v, None, None, first_keys, scale=0.3)
        return jnp.sum(out[:, 16:]), out

    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    assert np.isnan(out[:, :16]).all()
    assert np.isfinite(out[:, 16:]).all()
    assert all(np.isfinite(gradient[:, 16:]).all() for gradient in gradients)


@off_gpu
@pytest.mark.parametrize("T", [1024, 4096])
def test_memory_is_linear(T):
    """No intermediate result of the forward and backward pass has more than the scores of a block
    or the values of all tokens."""
    B, H, K, V = 2, 4, 192, 128
    shapes = (B, T, H, K), (B, T, H, K), (B, T, H, V)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def loss(q, k, v):
        out, lse = mla_prefill(q, k, v, scale=0.1)
        return out.astype(jnp.float32).sum() + lse.sum()

    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    assert largest_intermediate(program.jaxpr) <= max(
        math.prod(shapes[0]), B * H * blocked.LONGEST_BLOCK**2
    )


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(("policy", "loops"), [("nothing_saveable", 3), ("attention", 2)])
def test_a_policy_can_keep_the_result(policy, loops):
    """A policy of jax.checkpoint that saves attention's results leaves one forward loop, and the
    gradient's."""
    policies = jax.checkpoint_policies
    by_name = policies.save_only_these_names("attention")
    is_saved = policy == "attention"

    @functools.partial(jax.checkpoint, policy=by_name if is_saved else policies.nothing_saveable)
    def loss(q, k, v):
        out, _ = mla_prefill(jnp.sin(q), k, v, scale=0.1)
        return out.sum()

    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*[jnp.ones((1, 24, 1, 4))] * 3)
    assert str(program).count("= scan[") == loops


def test_scores_of_many_heads_fit():
    """The block is shorter for many sequences and heads, and if it would have much padding."""
    for tokens, heads, block in (
        (4096, 128, 512), (4096, 256, 512), (4096, 512, 256), (4096, 8192, 128), (600, 1, 304),
    ):  # fmt: skip
        q = jax.device_put(np.zeros((1, tokens, heads, 0), np.float32))
        assert blocked._Tiles.of(q, q, None, None, None).block == block


def hopper_arguments(widths=(192, 128), dtype="bfloat16", T=1024, S=1024, **more):
    K, V = widths
    shapes = {"q": (2, T, 2, K), "k": (2, S, 2, K), "v": (2, S, 2, V)}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return {**arrays, "starts": None, "lengths": None, **more}


@pytest.fixture
def hopper(monkeypatch):
    """Programs are traced for a Hopper GPU with cuDNN 9.19."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(target, "platform", lambda: "gpu")
    monkeypatch.setattr(target, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(cudnn._fused, "check_cudnn_version", lambda: 91900)
    for module in (mosaic_gpu, mosaic_gpu_gradient):
        monkeypatch.setattr(module, "require_hopper", lambda interpret: None)


def lowered_gradient(of_lse=False, **arguments):
    """Returns the program for a GPU."""
    static = {name: x for name, x in arguments.items() if x is None}
    arrays = {name: x for name, x in arguments.items() if x is not None}

    def loss(qkv, rest):
        out, lse = mla_prefill(**qkv, **rest, **static, scale=0.1)
        return out.astype(jnp.float32).sum() + (lse.sum() if of_lse else 0)

    qkv = {name: arrays.pop(name) for name in "qkv"}
    traced = jax.jit(jax.grad(loss)).trace(qkv, arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def shapes_of_result(**arguments):
    return jax.eval_shape(functools.partial(cudnn.mla_prefill, scale=0.1), **arguments)


LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)


@off_gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("arguments", "mask"),
    [
        ({"widths": (256, 256)}, "CAUSAL"),
        ({"widths": (96, 64)}, "CAUSAL"),
        ({"widths": (96, 64), "lengths": LENGTHS}, "PADDING_CAUSAL"),
        ({"widths": (64, 64), "dtype": "float16"}, "CAUSAL"),
    ],
    ids=["256", "96", "padded", "float16"],
)
def test_gradient_of_widths_that_our_kernels_refuse(arguments, mask):
    """cuDNN computes the result and its gradient."""
    text = lowered_gradient(**hopper_arguments(**arguments))
    assert "mosaic_gpu" not in text
    assert "__cudnn$fmhaSoftmax(" in text
    assert "__cudnn$fmhaSoftmaxBackward(" in text
    assert f"\\22mask_type\\22: \\22{mask}\\22" in text


@off_gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "arguments",
    [{}, {"starts": LENGTHS}, {"of_lse": True}, {"S": 2048}],
    ids=["whole sequences", "starts", "lse", "more keys"],
)
def test_gradient_on_hopper(arguments):
    of_lse = arguments.get("of_lse", False)
    rest = {name: x for name, x in arguments.items() if name != "of_lse"}
    text = lowered_gradient(of_lse, **hopper_arguments(**rest))
    assert "cudnn" not in text
    for kernel in ("mla_prefill_gradient_of_keys", "mla_prefill_gradient_of_queries"):
        assert kernel in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "takes bfloat16 or float16, got float32"),
        ({"widths": (192, 100)}, "in multiples of 8, got 192 and 100"),
        ({"widths": (512, 512)}, "at most 256 columns here and values no wider.* got 512 and 512"),
        ({"widths": (64, 128)}, "got 64 and 128"),
        ({"starts": LENGTHS}, "takes starts=None"),
        ({"S": 2048}, "a key for every query"),
        ({"T": 0, "S": 0}, "a key for every query"),
    ],
)
def test_cudnn_refuses(changes, message, hopper):
    with pytest.raises(NotImplementedError, match=message):
        shapes_of_result(**hopper_arguments(**changes))


@pytest.mark.parametrize(
    ("capability", "widths"), [("8.0", (128, 128)), ("10.0", (192, 128)), ("12.0", (96, 64))]
)
def test_cudnn_takes(capability, widths, hopper, monkeypatch):
    monkeypatch.setattr(target, "compute_capability", lambda: capability)
    out, lse = shapes_of_result(**hopper_arguments(widths))
    assert (out.shape, out.dtype) == ((2, 1024, 2, widths[1]), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 1024, 2), jnp.float32)


def test_cudnn_refuses_machines(hopper, monkeypatch):
    def refusal(**changes):
        with pytest.raises(NotImplementedError) as caught:
            shapes_of_result(**hopper_arguments(**changes))
        return str(caught.value)

    monkeypatch.setattr(target, "device_kind", lambda: "NVIDIA X")
    monkeypatch.setattr(cudnn._fused, "check_cudnn_version", lambda: 90900)
    assert "from cuDNN 9.10 on, got 192 and 128 on NVIDIA X with cuDNN 90900" in refusal()
    monkeypatch.setattr(target, "compute_capability", lambda: "8.0")
    assert "at most 128 columns" in refusal()
    assert "Hopper and later GPUs" in refusal(widths=(96, 64))
    for capability in ("7.5", "unknown"):
        monkeypatch.setattr(target, "compute_capability", lambda value=capability: value)
        assert refusal() == "runs on NVIDIA GPUs from Ampere on, this is NVIDIA X"

    def no_version():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(cudnn._fused, "check_cudnn_version", no_version)
    assert refusal() == "cuDNN is not installed"
    monkeypatch.setattr(cudnn, "_fused", None)
    assert refusal() == f"jax {jax.__version__} has no cuDNN attention where expected"
    monkeypatch.setattr(target, "platform", lambda: "cpu")
    assert refusal() == "runs on NVIDIA GPUs, this is cpu"


@on_gpu
@pytest.mark.parametrize("widths", [(192, 128), (256, 256), (96, 64), (128, 128)])
@pytest.mark.parametrize("lengths", [None, (300, 1, 0)], ids=["whole", "padded"])
def test_cudnn(widths, lengths):
    """Results and gradients of cuDNN, as the gradient of its own result and of our kernel's."""
    x = Inputs.random((0, 0, 0), lengths or (300, 300, 300), T=300, S=300, widths=widths,
                      scale=0.07, dtype="bfloat16")  # fmt: skip

    def without_starts(implementation, q, k, v, starts, ends, *, scale):
        return mla_prefill(
            q, k, v, None, ends if lengths else None, scale=scale, implementation=implementation
        )

    for implementation in ("cudnn", ("mosaic_gpu", "cudnn")):
        attend = functools.partial(without_starts, implementation)
        for got, want in zip(run(x, attend), x.expected(), strict=True):
            check(got, want, tolerance("bfloat16"))
        check_gradients(attend, x, of_lse=False)
