"""Tests of AdamW and Muon, against optax and against float64 references."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsv3_jax.initialization import abstract_model
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import optimizer
from dsv3_jax.training.checkpoints import CheckpointStore
from dsv3_jax.training.muon import orthogonalize
from dsv3_jax.training.optimizer import clip_by_global_norm, global_norm, make_optimizer
from dsv3_jax.training.trainer import Trainer
from sharding import make_layout
from tests.support.oracle import relative_error
from tests.training.tiny import RUN, arrays, evaluate, step

STEPS = 4
RUN = dataclasses.replace(RUN, clip_norm=0.5)
MUON = dataclasses.replace(RUN, optimizer="muon")
SHAPES: dict[str, Any] = {
    "embed_tokens": {"weight": (24, 16)},
    "layers": {
        "0": {"q": (16, 8), "o": (8, 16), "experts": (8, 16, 24), "norm": (16,)},
        "1": {"q": (16, 8), "o": (8, 16), "experts": (8, 16, 24), "norm": (16,)},
    },
    "lm_head": {"weight": (24, 16)},
}
"""Two pairs of equal matrices, two stacks of experts."""


def normal(seed: int, scale: float = 1.0) -> Any:
    """Returns a tree with the shapes ``SHAPES``."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: (scale * rng.normal(size=shape)).astype(np.float32),
        SHAPES,
        is_leaf=lambda each: isinstance(each, tuple),
    )


def taken(transformation: optax.GradientTransformation) -> list[tuple[Any, Any]]:
    """Returns parameters and state before each of ``STEPS`` steps and after the last."""

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = normal(0)
    states = [(params, transformation.init(params))]
    for i in range(STEPS):
        states.append(step(*states[-1], normal(i + 1, scale=1.0 / (i + 1))))
    return states


def gradients(i: int) -> dict[str, np.ndarray]:
    """Returns the gradients of step i, clipped, in float64."""
    grads = {name: g.astype(np.float64) for name, g in arrays(normal(i + 1, 1.0 / (i + 1))).items()}
    norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    assert norm > RUN.clip_norm
    return {name: g * RUN.clip_norm / norm for name, g in grads.items()}


# ---- AdamW ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip", "limit", "error"),
    [
        (optax.clip_by_global_norm, 1e9, 0.0),
        (optax.clip_by_global_norm, RUN.clip_norm, 1e-6),  # the norm is summed in another order
        (clip_by_global_norm, RUN.clip_norm, 0.0),
    ],
)
def test_adamw_is_that_of_optax(clip, limit, error):
    """State and values are the same, so that the checkpoints of earlier versions continue."""
    config = dataclasses.replace(RUN, clip_norm=limit)
    expected = optax.chain(
        clip(limit),
        optax.adamw(
            optimizer.learning_rate(config),
            *config.betas,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )
    for got, want in zip(taken(make_optimizer(config)), taken(expected), strict=True):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=error, atol=error * np.abs(b).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clipping_is_that_of_optax(dtype: str):
    """Up to the order of the float32 sum. Below the limit, gradients stay as they are."""
    grads = jax.tree.map(lambda g: jnp.asarray(g, dtype), normal(1))
    exact = np.sqrt(sum(np.sum(np.asarray(g, float) ** 2) for g in jax.tree.leaves(grads)))
    norm = jax.jit(global_norm)(grads)
    assert norm.dtype == jnp.float32
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    for limit in (exact / 3, 3 * exact):
        ours, theirs = clip_by_global_norm(limit), optax.clip_by_global_norm(limit)
        clipped, state = jax.jit(ours.update)(grads, ours.init(grads))
        assert jax.tree.structure(state) == jax.tree.structure(theirs.init(grads))
        for got, want in zip(*map(jax.tree.leaves, (clipped, grads)), strict=True):
            assert got.dtype == dtype
            if limit > exact:
                np.testing.assert_array_equal(got, want)
            else:
                got, want = (np.asarray(x, float) for x in (got, want))
                tolerance = 1e-6 if dtype == "float32" else 2**-8
                np.testing.assert_allclose(got, want * limit / exact, rtol=tolerance)


def test_the_norm_has_one_reduction_for_each_kind_of_matrix():
    """Equal names in all layers are one kind, those of MTP layers included. Matrices of equal shape
    but another name are not: on a mesh, their shardings may differ."""
    weights = normal(0)
    weights["mtp"] = {"0": weights["layers"]["0"]}
    weights["layers"]["2"] = {"q": np.ones((4, 4), np.float32)}
    jaxpr = str(jax.make_jaxpr(global_norm)(weights))
    kinds = ["embed_tokens", "q", "q of layer 2", "o", "experts", "norm", "lm_head"]
    assert jaxpr.count("reduce_sum[") == len(kinds)


def test_moments_in_bfloat16():
    """Each step is that of float64 from the stored moments, which are then rounded to nearest even.
    The update does not see the new moments rounded."""
    run = dataclasses.replace(RUN, moments_dtype="bfloat16")
    (b1, b2), states = run.betas, taken(make_optimizer(run))
    for i, (before, after) in enumerate(itertools.pairwise(states)):
        (params, moments), (new_params, new_moments) = (
            (arrays(p), state[1][0]) for p, state in (before, after)
        )
        rate = float(optimizer.learning_rate(run)(i))
        for name, gradient in gradients(i).items():
            mean, square = (arrays(tree)[name] for tree in (moments.mu, moments.nu))
            assert mean.dtype == square.dtype == ml_dtypes.bfloat16
            mean = b1 * mean.astype(np.float64) + (1 - b1) * gradient
            square = b2 * square.astype(np.float64) + (1 - b2) * gradient**2
            for got, want in ((new_moments.mu, mean), (new_moments.nu, square)):
                stored = arrays(got)[name]
                rounded = want.astype(np.float32).astype(ml_dtypes.bfloat16)
                # Float32 arithmetic can end on the other side of a tie.
                assert np.mean(stored != rounded) < 0.01
                assert np.max(np.abs(stored.astype(np.float64) / want - 1)) < 2**-8
            moved = mean / (1 - b1 ** (i + 1)) / (np.sqrt(square / (1 - b2 ** (i + 1))) + 1e-8)
            decay = run.weight_decay * params[name] * (params[name].ndim > 1)
            want = params[name] - rate * (moved + decay)
            assert relative_error(new_params[name], want) < 1e-6, name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_bfloat16_gradients_are_summed_in_float32(name: Any):
    """65,536 equal squares: a bfloat16 sum would stop at 256 of them, and the clipped gradient
    would be 16 times too large."""
    run = dataclasses.replace(RUN, optimizer=name, clip_norm=1.0, moments_dtype="bfloat16")
    transformation = make_optimizer(run)
    params = {"norm": jnp.zeros(2**16)}
    grads = {"norm": jnp.ones(2**16, jnp.bfloat16)}
    updates, state = jax.jit(transformation.update)(grads, transformation.init(params), params)
    inner = state[1].inner_states["adamw"].inner_state if name == "muon" else state[1]
    np.testing.assert_allclose(
        np.asarray(inner[0].mu["norm"], np.float32), (1 - RUN.betas[0]) / 256, rtol=2**-8
    )
    assert updates["norm"].dtype == jnp.float32


# ---- Muon ----------------------------------------------------------------------------------------


def published_iteration(x: np.ndarray) -> np.ndarray:
    """Returns the Newton-Schulz iteration of one matrix in float64, as in Keller Jordan's and
    Moonlight's code: a tall matrix is transposed."""
    if x.shape[0] > x.shape[1]:
        return published_iteration(x.T).T
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(8, 8), (8, 20), (20, 8)], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.15)])
def test_orthogonalization(shape, dtype, bound):
    x = np.random.default_rng(0).normal(size=(3, *shape))
    x[2] = 0
    got = np.asarray(orthogonalize(jnp.asarray(x, dtype)), np.float64)
    for matrix, result in zip(x[:2], got[:2], strict=True):
        assert relative_error(result, published_iteration(matrix)) < bound
        values = np.linalg.svd(result, compute_uv=False)
        assert values.max() < 1.25
        if shape != (8, 8):  # a square matrix of random numbers has a small singular value
            assert values.min() > 0.6
    np.testing.assert_array_equal(got[2], 0)


def test_the_length_of_the_gradient_does_not_matter():
    x = np.random.default_rng(0).normal(size=(1, 8, 20))
    want = orthogonalize(jnp.asarray(x, jnp.float32))
    for scale in (2.0**-40, 2.0**40):
        got = orthogonalize(jnp.asarray(scale * x, jnp.float32))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_muon_is_moonlight_s():
    """Recomputes all steps in float64: undamped momentum, as published, has the same direction."""
    (b1, b2), states = RUN.betas, taken(make_optimizer(MUON))
    params = {name: p.astype(np.float64) for name, p in arrays(states[0][0]).items()}
    means, squares = ({name: np.zeros(p.shape) for name, p in params.items()} for _ in range(2))
    by_adamw = set()
    for i in range(STEPS):
        rate = float(optimizer.learning_rate(RUN)(i))
        for name, g in gradients(i).items():
            if params[name].ndim == 1 or "embed_tokens" in name or "lm_head" in name:
                by_adamw.add(name)
                means[name] = b1 * means[name] + (1 - b1) * g
                squares[name] = b2 * squares[name] + (1 - b2) * g**2
                root = np.sqrt(squares[name] / (1 - b2 ** (i + 1))) + 1e-8
                update = means[name] / (1 - b1 ** (i + 1)) / root
            else:
                means[name] = 0.95 * means[name] + g
                nesterov = g + 0.95 * means[name]
                *_, n, m = g.shape
                flat = [published_iteration(each) for each in nesterov.reshape(-1, n, m)]
                update = 0.2 * np.sqrt(max(n, m)) * np.reshape(flat, g.shape)
            decay = RUN.weight_decay * params[name] * (params[name].ndim > 1)
            params[name] = params[name] - rate * (update + decay)
    assert len(by_adamw) == 4
    for name, got in arrays(states[-1][0]).items():
        assert relative_error(got, params[name]) < 1e-5, name


def test_muon_s_update_is_as_large_as_adamw_s():
    """Moonlight's scale makes the root mean square of an update 0.2 times the learning rate."""
    transformation = make_optimizer(dataclasses.replace(MUON, weight_decay=0.0))
    params = normal(0)
    updates, _ = jax.jit(transformation.update)(normal(1), transformation.init(params), params)
    rate = float(optimizer.learning_rate(RUN)(0))
    for name in ("q", "o", "experts"):
        size = np.sqrt(np.mean(np.square(updates["layers"]["1"][name]))) / rate
        assert 0.1 < size < 0.3, name


def test_which_parameters_have_muon(model):
    """Muon's have a momentum, the others two moments."""
    trainer = Trainer(abstract_model(model.config), MUON)
    by_name = {"momentum": set(), "mu": set(), "nu": set()}
    for path, leaf in jax.tree.leaves_with_path(trainer.abstract_state.optimizer):
        for kind, names in by_name.items():
            if f".{kind}[" in (name := jax.tree_util.keystr(path)):
                names.add(name.partition(f".{kind}")[2])
                assert leaf.dtype == jnp.float32
    params = jax.tree.leaves_with_path(trainer.abstract_state.params)
    adamw = {
        jax.tree_util.keystr(path)
        for path, leaf in params
        if leaf.ndim == 1 or "embed_tokens" in str(path) or "lm_head" in str(path)
    }
    assert by_name["mu"] == by_name["nu"] == adamw
    assert by_name["momentum"] == {jax.tree_util.keystr(path) for path, _ in params} - adamw
    assert any("gate" in name for name in by_name["momentum"])


def test_checkpoints_of_muon(model, tmp_path):
    trainer = Trainer(model, dataclasses.replace(MUON, moments_dtype="bfloat16"))
    start = trainer.init()
    state = start._replace(optimizer=jax.tree.map(lambda x: x + 3, start.optimizer))
    store = CheckpointStore(tmp_path, None)
    store.save(state, {})
    restored, _ = store.restore(0, trainer.abstract_state)
    store.close()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert len(jax.tree.leaves(state.optimizer)) > len(jax.tree.leaves(state.params))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(each)] for each in (restored, state)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("spec", [P("expert"), P(("data", "expert")), P()], ids=str)
def test_muon_on_eight_devices(spec):
    """Matrices that are sharded in any way have the same updates. Each device orthogonalises whole
    matrices: the two of a pair are padded to eight."""
    layout = make_layout("train", expert_devices=4)
    alone, spread = make_optimizer(MUON), make_optimizer(MUON, layout)
    params, grads = normal(0), normal(1)
    want, _ = jax.jit(alone.update)(grads, alone.init(params), params)
    shardings = jax.tree.map(
        lambda p: NamedSharding(layout.mesh, spec if p.ndim > 1 else P()), params
    )
    params, grads = jax.device_put((params, grads), (shardings, shardings))
    got, _ = jax.jit(spread.update)(grads, spread.init(params), params)
    for name, each in arrays(got).items():
        np.testing.assert_allclose(each, arrays(want)[name], rtol=1e-4, atol=1e-6)


# ---- a run ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon"},
        {"optimizer": "muon", "moments_dtype": "bfloat16", "compute_dtype": "bfloat16"},
        {"moments_dtype": "bfloat16"},
        {"optimizer": "muon", "lora_rank": 2},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_the_loss_falls(model: DeepSeekV3, settings: dict[str, Any]):
    trainer = Trainer(model, dataclasses.replace(RUN, **settings))
    state = trainer.init()
    before = float(evaluate(trainer, state).main)
    for _ in range(20):
        state, _ = step(trainer, state)
    assert float(evaluate(trainer, state).main) < 0.8 * before
