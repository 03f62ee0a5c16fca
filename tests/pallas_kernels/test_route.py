"""route: compares the reference with loops and the kernel with the reference; refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import route
from pallas_kernels.route import counting, mosaic_gpu, reference
from pallas_kernels.route.reference import Rule
from tests.pallas_kernels.machine import INTERPRET, kernel_runs, off_gpu, on_gpu
from tests.pallas_kernels.numerics import device
from tests.support.covering import covering

V3 = Rule(8, 8, 4, "noaux_tc", "sigmoid", True, 2.5)
MOONLIGHT = Rule(6, 1, 1, "noaux_tc", "sigmoid", True, 2.446)
V2 = Rule(6, 8, 3, "group_limited_greedy", "softmax", False, 16.0)
V2_LITE = Rule(6, 1, 1, "greedy", "softmax", False, 1.0)
SMALL = Rule(3, 4, 2, "noaux_tc", "sigmoid", True, 2.5)
SIXTEEN = Rule(4, 4, 2, "noaux_tc", "sigmoid", True, 2.5)
ONE, FIVE, NINE = (Rule(K, 1, 1, "greedy", "softmax", False, 1.0) for K in (1, 5, 9))


def inputs(tokens, experts, rule, valid=None):
    """Returns random arguments. ``valid``: share of valid tokens; None passes no mask."""
    rng = np.random.default_rng(tokens + experts)
    logits = device(rng.standard_normal((tokens, experts)), "float32")
    bias = None
    if rule.method == "noaux_tc":
        bias = device(0.1 * rng.standard_normal(experts), "float32")
    valid_mask = None if valid is None else jax.device_put(rng.random(tokens) < valid)
    return logits, bias, valid_mask


def by_loops(logits, bias, valid, rule):
    """Returns the fields of Routes, computed by NumPy and loops."""
    logits = np.asarray(logits, np.float64)
    M, E = logits.shape
    K, size = rule.num_experts_per_tok, E // rule.n_group
    if rule.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    choice = scores if bias is None else scores + np.asarray(bias, np.float64)
    experts, weights, pairs = np.zeros((M, K), int), np.zeros((M, K)), []
    for t in range(M):
        best = 2 if rule.method == "noaux_tc" else 1
        groups = [np.sort(choice[t, g * size :][:size])[-best:].sum() for g in range(rule.n_group)]
        open_groups = sorted(range(rule.n_group), key=lambda g: (-groups[g], g))[: rule.topk_group]
        candidates = [e for e in range(E) if e // size in open_groups]
        experts[t] = sorted(candidates, key=lambda e: (-choice[t, e], e))[:K]
        weights[t] = scores[t, experts[t]]
        if rule.normalize:
            weights[t] /= weights[t].sum() + 1e-20
        counted = valid is None or bool(valid[t])
        pairs += [(e if counted else E, t * K + j) for j, e in enumerate(experts[t])]
    order = np.asarray([pair for _, pair in sorted(pairs)])
    inverse = np.zeros_like(order)
    inverse[order] = np.arange(M * K)
    sizes = np.bincount([e for e, _ in pairs], minlength=E + 1)[:E]
    return scores, experts, weights * rule.scaling_factor, order, inverse, sizes


def check(got, want):
    for name, g, w in zip(got._fields, got, want, strict=True):
        assert g.shape == w.shape, name
        if name in ("scores", "weights"):
            assert g.dtype == jnp.float32
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-7, err_msg=name)
        else:
            assert g.dtype == jnp.int32
            np.testing.assert_array_equal(g, w, err_msg=name)


def options(rule):
    return {name: getattr(rule, name) for name in rule.__dataclass_fields__}


def kernel(*arrays, rule, interpret=INTERPRET):
    return compiled(mosaic_gpu.route, rule=rule, interpret=interpret)(*arrays)


def in_kernels(number, rule, monkeypatch):
    """Returns the kernel with one cluster for all tokens, or two kernels on the whole GPU."""
    most = mosaic_gpu.MAX_TOKENS if number == 1 else 0
    monkeypatch.setattr(mosaic_gpu, "ONE_KERNEL_TOKENS", most)
    return jax.jit(functools.partial(mosaic_gpu.route, rule=rule, interpret=INTERPRET))


def exact(*arrays, rule):
    return compiled(reference.route, rule=rule)(*arrays)


@functools.cache
def compiled(f, **options):
    """Returns the jitted function, cached so that tests of the same shapes share a compilation."""
    return jax.jit(functools.partial(f, **options))


@covering(
    {
        "experts, rule": [(256, V3), (64, MOONLIGHT), (160, V2), (64, V2_LITE), (8, SMALL)],
        "valid": [None, 0.6, 0.0],
        "tokens": [1, 37],
    },
    sample=1,
)
def test_reference(experts, rule, tokens, valid):
    arrays = inputs(tokens, experts, rule, valid)
    f = compiled(route, **options(rule), implementation="reference")
    check(f(*arrays), by_loops(*arrays, rule))


def test_choices_below_zero():
    """With biases so low that all choices are negative, masked experts are still not chosen."""
    logits, bias, _ = inputs(37, 8, SMALL)
    arrays = logits, bias - 2.0, None
    f = compiled(route, **options(SMALL), implementation="reference")
    check(f(*arrays), by_loops(*arrays, SMALL))


@kernel_runs
@pytest.mark.parametrize(
    ("tokens", "experts", "rule", "valid"),
    [
        pytest.param(3, 256, V3, 0.6, id="V3"),
        pytest.param(4, 160, V2, None, id="V2"),
        pytest.param(1, 32, ONE, None, id="one choice"),
        pytest.param(5, 16, SIXTEEN, 0.6, id="16 experts"),
        pytest.param(3, 72, V2_LITE, None, id="72 experts"),
        pytest.param(2, 8, SMALL, None, id="8 experts", marks=pytest.mark.slow),
        pytest.param(1, 64, MOONLIGHT, None, id="one token", marks=pytest.mark.slow),
        pytest.param(31, 64, MOONLIGHT, 0.8, id="eight CTAs", marks=pytest.mark.slow),
        pytest.param(5, 64, V2_LITE, 0.0, id="all invalid", marks=pytest.mark.slow),
        pytest.param(9, 32, NINE, None, id="nine choices", marks=pytest.mark.slow),
    ],
)
def test_kernel(tokens, experts, rule, valid):
    arrays = inputs(tokens, experts, rule, valid)
    check(kernel(*arrays, rule=rule), exact(*arrays, rule=rule))


@kernel_runs
def test_lanes_without_an_expert_are_not_chosen():
    """All choices are below zero, which such a lane would have."""
    logits, bias, _ = inputs(5, 16, SIXTEEN)
    arrays = logits, bias - 2.0, None
    check(kernel(*arrays, rule=SIXTEEN), exact(*arrays, rule=SIXTEEN))


TWO = Rule(2, 4, 2, "noaux_tc", "sigmoid", True, 2.5)
THREE = Rule(3, 1, 1, "greedy", "softmax", False, 1.0)


@kernel_runs
@pytest.mark.parametrize(
    ("tokens", "rule", "valid", "plan"),
    [
        pytest.param(41, TWO, 0.9, (2, 4, 2), id="two per warp", marks=pytest.mark.slow),
        pytest.param(65, FIVE, 0.5, (2, 4, 3), id="three per warp", marks=pytest.mark.slow),
        pytest.param(100, THREE, None, (2, 4, 4), id="four per warp"),
        pytest.param(257, ONE, 0.7, (2, 4, 9), id="nine per warp", marks=pytest.mark.slow),
    ],
)
def test_kernel_with_more_tokens_than_warps(tokens, rule, valid, plan, monkeypatch):
    # XLA runs the interpreter's warpgroups on as many threads as the tests have devices, eight.
    monkeypatch.setattr(mosaic_gpu, "_CLUSTER", 2)
    f = in_kernels(1, rule, monkeypatch)
    got = mosaic_gpu.plan_of(tokens, 33)
    assert (got.ctas, got.warpgroups, got.steps) == plan
    arrays = inputs(tokens, 32, rule, valid)
    check(f(*arrays), exact(*arrays, rule=rule))


@kernel_runs
@pytest.mark.parametrize(
    ("tokens", "rule", "valid", "multiprocessors", "plan"),
    [
        # More counts than a thread loads at once.
        pytest.param(37, TWO, 0.7, 3, (3, 1), id="three CTAs", marks=pytest.mark.slow),
        # Two words per warpgroup.
        pytest.param(131, TWO, 0.9, 1, (1, 9), id="nine per warp", marks=pytest.mark.slow),
        pytest.param(51, ONE, None, 2, (2, 2), id="all valid", marks=pytest.mark.slow),
    ],
)
def test_two_kernels(tokens, rule, valid, multiprocessors, plan, monkeypatch):
    """Many tokens are spread over all multiprocessors."""
    monkeypatch.setattr(mosaic_gpu, "_MULTIPROCESSORS", multiprocessors)
    monkeypatch.setattr(mosaic_gpu, "_TOGETHER", 2)
    f = in_kernels(2, rule, monkeypatch)
    got = mosaic_gpu.plan_of(tokens, 33)
    assert (got.ctas, got.steps) == plan
    arrays = inputs(tokens, 32, rule, valid)
    check(f(*arrays), exact(*arrays, rule=rule))


@pytest.mark.parametrize("columns", [32, 65, 257, 385])
def test_plan(columns):
    """All tokens have a warp, few warps have none, and a warp loads all chunks' sums at once."""
    for tokens in [1, 3, 4, 5, 64, 65, 128, 129, 300, 512, 513, 2304, 8192, 16384]:
        plan = mosaic_gpu.plan_of(tokens, columns)
        capacity = plan.ctas * plan.warpgroups * plan.steps * 4
        assert tokens <= capacity
        assert plan.ctas <= (8 if plan.one_kernel else 132)
        assert plan.one_kernel or capacity - tokens < 16 * plan.steps
        assert plan.columns >= columns
        assert plan.rounds * plan.warpgroups * 128 == plan.columns <= 32 * 32
        assert plan.cta_words * 2 * 4 < 200_000  # bytes of shared memory


def counted(*arrays, rule):
    return compiled(counting.choose_and_count, rule=rule)(*arrays)


def check_exactly(got, want):
    for name, g, w in zip(got._fields, got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), name
        np.testing.assert_array_equal(g, w, err_msg=name)


@covering(
    {
        "experts, rule": [(256, V3), (64, MOONLIGHT), (160, V2), (64, V2_LITE), (8, SMALL)],
        "valid": [None, 0.6, 0.0],
        "tokens": [1, 37, 300],
    },
    sample=1,
)
def test_counting(experts, rule, tokens, valid):
    arrays = inputs(tokens, experts, rule, valid)
    check_exactly(counted(*arrays, rule=rule), exact(*arrays, rule=rule))


@off_gpu
def test_counting_is_for_gpus():
    with pytest.raises(NotImplementedError, match="is for GPUs, this is cpu"):
        route(*inputs(1, 64, MOONLIGHT), **options(MOONLIGHT), implementation="counting")


@on_gpu
def test_many_tokens_are_counted():
    arrays = inputs(16385, 64, MOONLIGHT, 0.9)
    check(compiled(route, **options(MOONLIGHT))(*arrays), exact(*arrays, rule=MOONLIGHT))


@on_gpu
@pytest.mark.parametrize(
    ("tokens", "experts", "rule", "valid", "kernels"),
    [
        (128, 256, V3, 0.9, 1),
        (257, 384, V3, None, 1),
        (512, 64, MOONLIGHT, 0.9, 1),
        (2304, 64, MOONLIGHT, 0.9, 1),
        (513, 256, V3, 0.9, 2),
        (2304, 64, MOONLIGHT, None, 2),
        (4097, 160, V2, 0.0, 2),
        (16384, 256, V3, 0.9, 2),
    ],
)
def test_kernel_with_many_tokens(tokens, experts, rule, valid, kernels, monkeypatch):
    arrays = inputs(tokens, experts, rule, valid)
    check(in_kernels(kernels, rule, monkeypatch)(*arrays), exact(*arrays, rule=rule))


@on_gpu
@pytest.mark.parametrize(("tokens", "kernels"), [(64, 1), (512, 1), (2304, 2)])
def test_kernel_repeats_its_result(tokens, kernels, monkeypatch):
    """CTAs that did not wait for each other would give other results now and then."""
    arrays = inputs(tokens, 64, MOONLIGHT, 0.9)
    f = in_kernels(kernels, MOONLIGHT, monkeypatch)
    want = f(*arrays)
    for _ in range(200):
        check_exactly(f(*arrays), want)


SPECIAL = Rule(6, 4, 2, "noaux_tc", "sigmoid", True, 2.5)
CASES = ["ties", "same experts", "large bias", "infinite", "not a number"]


def special_inputs(case):
    """Returns arguments with special values, for the rule SPECIAL."""
    logits, bias, valid = inputs(6, 64, SPECIAL, 0.8)
    if case == "ties":
        logits, bias = jnp.round(logits), jnp.zeros_like(bias)
        logits = logits.at[0].set(0.0)
    elif case == "same experts":
        logits = jnp.broadcast_to(logits[0], logits.shape)
    elif case == "large bias":  # negative choices, scores that underflow
        bias, logits = bias - 12.0, logits.at[1].set(-200.0)
        bias = bias.at[:40].add(-1e9)
    elif case == "infinite":  # -inf inside the best groups as well as outside
        bias = jnp.full_like(bias, -jnp.inf).at[jnp.asarray([3, 50])].set(0.0)
    else:
        logits = logits.at[2, 5].set(jnp.nan).at[2, 50].set(jnp.nan)
    return logits, bias, valid


@kernel_runs
@pytest.mark.parametrize("case", CASES)
def test_kernel_with_special_values(case):
    arrays = special_inputs(case)
    check(kernel(*arrays, rule=SPECIAL), exact(*arrays, rule=SPECIAL))


@pytest.mark.parametrize("case", CASES)
def test_counting_with_special_values(case):
    arrays = special_inputs(case)
    check_exactly(counted(*arrays, rule=SPECIAL), exact(*arrays, rule=SPECIAL))


def test_gradient_through_counting():
    logits, bias, valid = inputs(37, 64, MOONLIGHT, 0.8)

    def gradients(f):
        def loss(logits, bias):
            routes = f(logits, bias, valid, rule=MOONLIGHT)
            return jnp.sum(routes.scores**2) + jnp.sum(jnp.sin(routes.weights))

        return jax.jit(jax.grad(loss, (0, 1)))(logits, bias)

    for got, want in zip(
        gradients(counting.choose_and_count), gradients(reference.route), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@kernel_runs
def test_gradient_of_the_logits():
    logits, bias, valid = inputs(2, 64, MOONLIGHT, 0.8)
    rng = np.random.default_rng(0)
    cotangents = [device(rng.standard_normal(s), "float32") for s in ((2, 64), (2, 6))]

    def gradients(f):
        def loss(logits, bias):
            routes = f(logits, bias, valid, rule=MOONLIGHT)
            return jnp.sum(routes.scores * cotangents[0]) + jnp.sum(routes.weights * cotangents[1])

        return jax.jit(jax.grad(loss, (0, 1)))(logits, bias)

    for got, want in zip(gradients(kernel), gradients(reference.route), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "experts", "changes", "message"),
    [
        (16385, 64, {}, "takes 1 to 16384 tokens, got 16385"),
        (0, 64, {}, "takes 1 to 16384 tokens, got 0"),
        (4, 416, {}, "takes 384 experts at most, got 416"),
        (4, 64, {"num_experts_per_tok": 17}, "takes 16 experts per token at most, got 17"),
        (4, 64, {"n_group": 16, "topk_group": 16}, "takes 8 groups at most, got 16"),
    ],
)
def test_kernel_refusals(tokens, experts, changes, message):
    rule = Rule(**{**options(MOONLIGHT), **changes})
    with pytest.raises(NotImplementedError, match=message):
        kernel(*inputs(tokens, experts, rule), rule=rule, interpret=object())


@off_gpu
def test_no_gpu():
    arrays = inputs(1, 64, MOONLIGHT)
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs, this is cpu"):
        route(*arrays, **options(MOONLIGHT), implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "best"}, "method: expected one of noaux_tc, .* got 'best'"),
        ({"scoring": "tanh"}, "scoring: expected one of sigmoid, softmax, got 'tanh'"),
        ({"n_group": 5}, "n_group: expected to divide E=64"),
        ({"n_group": 8, "topk_group": 9}, "n_group: .* topk_group=9 or more, got 8"),
        ({"n_group": 64, "topk_group": 64}, "n_group: expected groups of two experts or more"),
        ({"n_group": 16}, "num_experts_per_tok: expected 1 to 4, .* got 6"),
    ],
)
def test_inconsistent_settings(changes, message):
    rule = Rule(**{**options(MOONLIGHT), **changes})
    with pytest.raises(ValueError, match=message):
        rule.check(*inputs(2, 64, MOONLIGHT))


def test_inconsistent_shapes():
    logits, bias, valid = inputs(2, 64, MOONLIGHT, 0.5)
    with pytest.raises(ValueError, match=r"bias: expected shape \(64,\), got \(63,\)"):
        MOONLIGHT.check(logits, bias[:-1], valid)
    with pytest.raises(ValueError, match=r"valid: expected shape \(2,\), got \(1,\)"):
        MOONLIGHT.check(logits, bias, valid[:-1])


@pytest.mark.parametrize(
    ("tokens", "experts", "rule", "kernels"),
    [
        (64, 256, V3, 1),
        (1, 64, MOONLIGHT, 1),
        (128, 160, V2, 1),
        (129, 64, MOONLIGHT, 2),
        (2304, 64, MOONLIGHT, 2),
    ],
)
def test_lowers_for_cuda(tokens, experts, rule, kernels, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    f = functools.partial(mosaic_gpu.route, rule=rule)
    arrays = inputs(tokens, experts, rule, 0.5)
    text = jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels
