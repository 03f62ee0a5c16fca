"""Tests that training on eight devices equals training on one, with every layout."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import random_model
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.checkpoints import CheckpointStore
from dsv3_jax.training.corpus import Corpus
from dsv3_jax.training.metrics_log import Entry, read_metrics
from dsv3_jax.training.run import train
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.state import TrainingState
from dsv3_jax.training.step import Metrics
from dsv3_jax.training.trainer import Trainer
from sharding import DEFAULT_RULES, Layout, Placement, Rules, make_layout, make_mesh
from tests.support.checkpoints import (
    random_tensors,
    sparse_config,
    tiny_config,
    write_checkpoint,
)
from tests.support.command import run
from tests.support.oracle import relative_error
from tests.support.xla_flags import fast_compilation
from tests.training.tiny import RUN, arrays

pytestmark = pytest.mark.usefixtures("own_compile_cache")
ROOT = Path(__file__).parents[2]

# One dense layer, one MoE layer and one MTP layer.
CONFIG = tiny_config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
)
# Clipping is on, so that a norm over one shard instead of the whole gradient would be noticed.
RUN = dataclasses.replace(RUN, clip_norm=0.5, warmup_steps=0)
TOKENS = np.random.default_rng(1).integers(1, 64, (16, 12))
TOKENS[:, 0] = 0
TOKENS[[3, 4, 9, 9], [5, 2, 4, 8]] = 0

LAYOUTS = {
    "train, data 2 x expert 4": lambda: make_layout("train", expert_devices=4),
    "train, data 8": lambda: make_layout("train", expert_devices=1),
    "train, expert 8": lambda: make_layout("train"),
    "train, context 2": lambda: make_layout("train", context_devices=2),
    "train, data 2, context 2": lambda: make_layout("train", expert_devices=2, context_devices=2),
    "train, one sequence on 2": lambda: make_layout(
        "train", devices=jax.devices()[:2], context_devices=2
    ),
    "dp_attention_ep": lambda: make_layout("dp_attention_ep"),
    "tensor_parallel": lambda: make_layout("tensor_parallel"),
    "tp_attention_ep": lambda: make_layout("tp_attention_ep"),
    "data 2, expert 2, tensor 2": lambda: Layout(make_mesh(data=2, expert=2, tensor=2)),
    "data 2, expert 2, tensor 2 with FSDP": lambda: Layout(
        make_mesh(data=2, expert=2, tensor=2),
        Rules({**DEFAULT_RULES.table, "vocab": None}),
        fsdp_axes=("data", "expert"),
    ),
}
QUICK = "train, data 2 x expert 4"
CONTEXT = "train, data 2, context 2"
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != QUICK]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    home = tmp_path_factory.mktemp("eight")
    write_checkpoint(home, CONFIG, random_tensors(CONFIG, seed=3))
    return home


def load(directory, name: str | None) -> DeepSeekV3:
    layout = None if name is None else LAYOUTS[name]()
    return dsv3_jax.load(directory, dtype=jnp.float32, layout=layout)[0]


class Stepped(NamedTuple):
    trainer: Trainer
    state: TrainingState
    metrics: list[Metrics]
    gradients: dict[str, np.ndarray]
    """Gradients of the first step after clipping, by parameter."""


def steps(model: DeepSeekV3, count: int = 2, **settings: Any) -> Stepped:
    """Performs ``count`` steps on one batch."""
    trainer = Trainer(model, dataclasses.replace(RUN, **settings))
    state, metrics, gradients = trainer.init(), [], {}
    for i in range(count):
        state, step_metrics = trainer.step(state, trainer.shard_batch(TOKENS))
        metrics.append(jax.device_get(step_metrics))
        if i == 0:
            moments = arrays(state.optimizer[1][0].mu)
            gradients = {name: mu / (1 - RUN.betas[0]) for name, mu in moments.items()}
    return Stepped(trainer, state, metrics, gradients)


@pytest.fixture(scope="module")
def alone(directory):
    return steps(load(directory, None))


@pytest.fixture(scope="module")
def spread(directory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns about arrays that could not be donated
        return steps(load(directory, QUICK))


@pytest.fixture(scope="module")
def stepped(request, directory, spread):
    """The two steps in one layout: its tests run one after the other, so each is traced once."""
    name = request.param
    return name, spread if name == QUICK else steps(load(directory, name))


def assert_same(got: Stepped, want: Stepped):
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        assert np.linalg.norm(gradient) > 0, name
        assert relative_error(got.gradients[name], gradient) < 1e-5, name
    for one, other in zip(got.metrics, want.metrics, strict=True):
        np.testing.assert_array_equal(one.expert_load, other.expert_load)
        for name in ("losses", "gradient_norm", "expert_imbalance"):
            assert relative_error(getattr(one, name), getattr(other, name)) < 1e-5, name
    assert want.metrics[0].gradient_norm > 1.5 * RUN.clip_norm
    biases = arrays(want.state.biases)
    for name, bias in arrays(got.state.biases).items():
        assert np.abs(biases[name]).max() > 0
        np.testing.assert_array_equal(bias, biases[name])


# ---- the same steps ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stepped", [QUICK, *SLOW], indirect=True)
def test_gradients(alone, stepped):
    """Compares the gradient of every parameter, and the metrics of a second step, which depend on
    the first step's updates of weights and biases."""
    assert_same(stepped[1], alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", [QUICK, CONTEXT])
def test_accumulation_and_remat(directory, alone, name):
    """Uses two microbatches, and recomputes layers in the backward pass."""
    assert_same(steps(load(directory, name), accumulate=2, remat=True), alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", [QUICK, CONTEXT])
def test_scanned_layers(name):
    changes = {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    config = ModelConfig.from_hf(CONFIG | changes)
    want = steps(random_model(config, 0))
    assert_same(steps(random_model(config, 0, LAYOUTS[name]()), scan_layers=True), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [QUICK, "data 2, expert 2, tensor 2", "data 2, expert 2, tensor 2 with FSDP"]
)
def test_low_rank_updates(directory, name):
    settings = {"lora_rank": 2, "count": 3}
    want, got = (steps(load(directory, each), **settings) for each in (None, name))
    for one, other in zip(got.metrics, want.metrics, strict=True):
        assert relative_error(one.losses, other.losses) < 1e-5
        assert relative_error(one.gradient_norm, other.gradient_norm) < 1e-5
    frozen = got.trainer.model(got.state).layers[0].mlp.up_proj.weight.get_value()
    assert frozen.sharding.shard_shape(frozen.shape) != frozen.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", [QUICK, CONTEXT])
def test_bfloat16(directory, name):
    """Sums over devices have rounded terms, but are not rounded themselves."""
    models = (load(directory, name) for name in (None, name))
    want, got = (steps(model, compute_dtype="bfloat16") for model in models)
    for name, gradient in want.gradients.items():
        assert relative_error(got.gradients[name], gradient) < 0.05, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ("muon", QUICK),
        ("muon", CONTEXT),
        ("muon", "data 2, expert 2, tensor 2"),
        ("muon", "data 2, expert 2, tensor 2 with FSDP"),
        ("adamw", "data 2, expert 2, tensor 2 with FSDP"),
    ],
)
def test_optimizers(directory, optimizer, name):
    """Compares the updates of a step with moments in bfloat16, two microbatches and QK-clip."""
    settings = {"optimizer": optimizer, "moments_dtype": "bfloat16"}
    config = dataclasses.replace(RUN, **settings, accumulate=2, qk_clip=0.01)
    updates, clipped = [], []
    for layout in (None, name):
        model = load(directory, layout)  # a second init needs it
        trainer = Trainer(model, config)
        before = arrays(trainer.init().params)
        state, metrics = trainer.step(trainer.init(), trainer.shard_batch(TOKENS))
        updates.append({name: p - before[name] for name, p in arrays(state.params).items()})
        clipped.append(int(metrics.clipped_heads))
    assert 0 < clipped[0] == clipped[1]
    for parameter, update in updates[0].items():
        assert np.linalg.norm(update) > 0, parameter
        # Newton-Schulz, and AdamW's division by its second moment, enlarge rounding errors.
        assert relative_error(updates[1][parameter], update) < 5e-3, parameter


# ---- shardings -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_matrices_are_not_replicated(spread):
    """Each device has an eighth of every float32 matrix and of its moments."""
    for tree in (spread.state.params, spread.state.optimizer):
        for path, leaf in jax.tree.leaves_with_path(tree):
            shard = leaf.sharding.shard_shape(leaf.shape)
            replicas = 8 if leaf.ndim < 2 else 1
            assert np.prod(shard) * 8 == leaf.size * replicas, jax.tree_util.keystr(path)


@pytest.mark.slow
def test_one_program_that_donates_its_state(spread):
    assert spread.trainer.programs.step._cache_size() == 1
    state = jax.tree.map(jnp.copy, spread.state)
    spread.trainer.step(state, spread.trainer.shard_batch(TOKENS))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_the_initial_model_is_not_modified(directory):
    model = load(directory, QUICK)
    trainer = Trainer(model, RUN)
    state = trainer.init()
    pointers = {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(nnx.state(model))
        for shard in leaf.addressable_shards
    }
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            assert shard.data.unsafe_buffer_pointer() not in pointers
    trained = trainer.model(state)
    assert trained.layout == model.layout
    for one, other in zip(*(jax.tree.leaves(nnx.state(m)) for m in (trained, model)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


@pytest.mark.slow
def test_random_weights_do_not_depend_on_devices():
    config = ModelConfig.from_hf(CONFIG)
    one, eight = (random_model(config, 3, layout) for layout in (None, LAYOUTS[QUICK]()))
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (one, eight)), strict=True):
        np.testing.assert_array_equal(a, b)
    Trainer(eight, RUN)  # which checks the shardings


# ---- collectives ---------------------------------------------------------------------------------


def collectives(trainer: Trainer) -> dict[str, int]:
    """Counts the collectives of a compiled step, except those of one device with itself."""
    batch = trainer.shard_batch(TOKENS)
    text = trainer.programs.step.lower(trainer.abstract_state, None, batch).compile().as_text()
    lines = [line for line in text.splitlines() if "replica_groups={{0},{1}" not in line]
    names = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
    counts = {n: sum(bool(re.search(rf" {n}(-start)?\(", li)) for li in lines) for n in names}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.slow
@pytest.mark.parametrize("stepped", [QUICK, *SLOW[:-2]], indirect=True)
def test_collectives(stepped):
    """Each matrix is all-gathered where it is used, and its gradient is reduce-scattered. This
    includes the experts if there is a data axis. Each of the two MoE layers exchanges tokens in
    both directions, and so do their gradients. MTP uses embedding and head a second time, but XLA
    does not gather them again. Matrices are gathered once more for the backward pass, unless XLA
    merges the two, as it does on CPUs with jax 0.10. If sequences are divided, the latents of each
    of the three attentions are gathered too, again for the backward pass, and two halves of the
    queries are exchanged there and back, and so are their gradients.
    """
    name, (trainer, *_) = stepped
    dense, moe, experts = 5 + 3, 5 + 1 + 3, 3
    layers, exchanges = dense + 2 * moe + 1, 2 * 2
    want = {
        "train, data 2 x expert 4": (layers + 2 * experts, 2, exchanges),
        "train, data 8": (layers + 2 * experts, 2, 0),
        "train, expert 8": (layers, 2, exchanges),
        "train, context 2": (layers + 2 * experts, 2, exchanges),
        "train, data 2, context 2": (layers + 2 * experts, 2, exchanges),
        "train, one sequence on 2": (layers + 2 * experts, 2, 0),
        "dp_attention_ep": (0, 0, exchanges),
    }
    counts = collectives(trainer)
    if name in want:
        matrices, shared, exchanged = want[name]
        latents = 3 if trainer.layout.num_shards("tokens") > 1 else 0
        once = matrices + shared + exchanged + 2 * latents
        assert counts.pop("all-gather", 0) in (once, once + max(matrices - 1, 0))  # eh_proj is kept
        assert counts.pop("reduce-scatter", 0) == matrices + 2 * shared + exchanged + latents
        if latents:  # others shift tokens for MTP and the losses
            assert counts.pop("collective-permute") >= latents * 2 * 2 * 2
    else:
        assert counts.pop("all-gather", 0) <= 4  # of the embedding and the head
    assert counts.keys() == {"all-reduce"}  # vectors, losses, norms, loads, sharded sums


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # whose masters are in two halves
def test_saved_on_eight_restored_on_one_and_back(dtype, directory, alone, spread, tmp_path):
    if dtype != RUN.compute_dtype:
        models = load(directory, None), load(directory, QUICK)
        alone, spread = (steps(model, compute_dtype=dtype) for model in models)
    stores = [CheckpointStore(tmp_path / str(i), 2) for i in range(2)]
    stores[0].save(spread.state, {"next_index": 5})
    one, batches = stores[0].restore(2, alone.trainer.abstract_state)
    assert batches == {"next_index": 5}
    stores[1].save(one, {})
    eight, _ = stores[1].restore(2, spread.trainer.abstract_state)
    shapes = jax.tree.leaves(spread.trainer.abstract_state)
    leaves = [jax.tree.leaves(state) for state in (spread.state, one, eight)]
    for a, b, c, shape in zip(*leaves, shapes, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
        assert len(b.sharding.device_set) == 1
        assert c.sharding.is_equivalent_to(shape.sharding, c.ndim)
    for trainer, state in ((alone.trainer, one), (spread.trainer, eight)):
        trainer.step(state, trainer.shard_batch(TOKENS))
        assert trainer.programs.step._cache_size() == 1


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    noise = np.random.default_rng(2).integers(1, 64, 2000)
    noise[::9] = 0
    return Corpus(noise[:1700], noise[1700:])


def assert_same_losses(got: list[Entry], want: list[Entry]):
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for part in ("losses", "held_out"):
            for name, value in other.get(part, {}).items():
                assert one[part][name] == pytest.approx(value, rel=1e-4), (other["step"], name)


@pytest.mark.slow
def test_a_run_resumes_on_other_devices(directory, corpus, tmp_path):
    """Four steps on one device and four on eight give the losses of eight steps on one device."""
    config = dataclasses.replace(RUN, steps=8, accumulate=2)
    settings = RunSettings(batch=16, length=12, log_every=1, eval_batches=1, save_every=4)
    want = train(load(directory, None), corpus, tmp_path / "alone", config, settings)

    class StopError(Exception):
        pass

    def stop(entry):
        if entry["step"] == 5:
            raise StopError

    with pytest.raises(StopError):
        train(load(directory, None), corpus, tmp_path / "on", config, settings, report=stop)
    model = load(directory, QUICK)
    got = train(model, corpus, tmp_path / "on", config, settings, resume=True)
    assert got.finished
    assert_same_losses(got.metrics, want.metrics)
    embedding = got.model.embed_tokens.weight.get_value()
    assert embedding.sharding.shard_shape(embedding.shape) == (8, 32)


COMMAND = "import sys; from dsv3_jax.cli.main import main; sys.exit(main())"


@pytest.mark.slow
def test_two_processes(directory, corpus, tmp_path):
    """Two processes write the metrics and the model that one process with one device writes."""
    np.savez(tmp_path / "data.npz", **corpus._asdict())
    arguments = ("--data", tmp_path / "data.npz", "--steps", 3, "--save-every", 2, "--log-every", 1)
    arguments += ("--batch", 16, "--length", 12, "--eval-batches", 1, "--compute-dtype", "float32")
    arguments += ("--to", "float32", "--from", directory)
    command = [sys.executable, "scripts/launch_local.py", "-n", 2, "--devices-per-process", 2]
    command += ["--", sys.executable, "-c", COMMAND, "train", *arguments, "--out", tmp_path / "two"]
    command += ["--distributed", "--layout", "train", "--expert-devices", 2]
    process = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": fast_compilation()},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stderr.count("step 3/3") == 1  # only the first process reports progress
    assert run("train", *arguments, "--out", tmp_path / "one") == 0
    got, want = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    assert_same_losses(got, want)
    records = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("two", "one"))
    assert len({r["weights"]["fingerprint"] for r in records}) == 1
    models = (
        dsv3_jax.load(tmp_path / name / "model", dtype="float32")[0] for name in ("two", "one")
    )
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in models), strict=True):
        assert relative_error(a, b) < 1e-4
    status = run("train", "--resume", "--out", tmp_path / "two", "--layout", "single")
    assert status == 0  # the run is complete, and its checkpoint is read


# ---- refusals ------------------------------------------------------------------------------------


def refused(pattern: str, run: Any):
    with pytest.raises(ValueError, match=pattern) as caught:
        run()
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_trained(directory):
    layout = make_layout("dp_attention_ep", exchange="all_to_all")
    exchanged = dsv3_jax.load(directory, layout=layout)[0]
    refused(
        "^exchange: expected all_gather for training, .* all_to_all$",
        lambda: Trainer(exchanged, RUN),
    )
    placed = load(directory, "dp_attention_ep").place_experts(Placement.identity(2, 8))
    refused("^placement: expected none for training", lambda: Trainer(placed, RUN))
    unsharded = load(directory, None)
    unsharded.lay_out(LAYOUTS[QUICK]())
    refused(
        r"^embed_tokens\.weight: expected the sharding of the model's layout",
        lambda: Trainer(unsharded, RUN),
    )


@pytest.mark.slow
def test_batches_divide_over_the_devices(spread, directory, tmp_path):
    refused(
        "^tokens: expected a batch size in multiples of 8 devices, got 12",
        lambda: spread.trainer.shard_batch(TOKENS[:12]),
    )
    config, settings = dataclasses.replace(RUN, accumulate=2), RunSettings(batch=8, length=12)
    corpus = Corpus(np.ones(900, np.int32), np.ones(100, np.int32))
    model = load(directory, QUICK)
    refused(
        "^batch: expected a multiple of 8 devices x accumulate=2, got 8",
        lambda: train(model, corpus, tmp_path / "none", config, settings),
    )
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_sequences_divide_over_the_devices(directory, tmp_path):
    model, corpus = load(directory, CONTEXT), Corpus(np.ones(900, np.int32), np.ones(90, np.int32))
    message = "^length: expected a multiple of 4 tokens per sequence for context_devices=2, got 14"
    refused(
        message,
        lambda: train(model, corpus, tmp_path / "none", RUN, RunSettings(batch=8, length=14)),
    )
    refused(message, lambda: model(jnp.ones((4, 14), jnp.int32)))
    cache = LatentKVCache.init(model.cache_spec(), 8, 16, layout=model.layout)
    refused(
        "^context_devices: expected none with a cache, got 2",
        lambda: model.extend(jnp.ones((8, 4), jnp.int32), jnp.full(8, 4), cache, "expanded"),
    )
    rules = Rules({**DEFAULT_RULES.table, "tokens": "tensor", "vocab": None})
    refused(
        "^rules: expected axes 'tokens' and 'heads' over different mesh axes, got both over tensor",
        lambda: load(directory, None).lay_out(Layout(make_mesh(expert=4, tensor=2), rules)),
    )
    sparse = ModelConfig.from_hf(sparse_config())
    refused(
        "^context_devices: expected none for sparse attention, deepseek_v32, got 2",
        lambda: random_model(sparse, 0, LAYOUTS[CONTEXT]()),
    )


def test_several_processes_have_a_layout(directory, tmp_path, monkeypatch):
    model = load(directory, None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    corpus = Corpus(np.ones(900, np.int32), np.ones(100, np.int32))
    refused(
        "^layout: expected one over the devices of 2 processes, got none",
        lambda: train(model, corpus, tmp_path / "none", RUN),
    )


def test_sizes_of_the_train_layout(directory):
    assert dict(make_layout("train").mesh.shape) == {"data": 1, "expert": 8, "tensor": 1}
    assert dict(LAYOUTS[QUICK]().mesh.shape) == {"data": 2, "expert": 4, "tensor": 1}
    refused(
        "^expert_devices: expected a divisor of 8 devices, got 3",
        lambda: make_layout("train", expert_devices=3),
    )
    refused(
        "^expert_devices: expected None for dp_attention_ep, got 4",
        lambda: make_layout("dp_attention_ep", expert_devices=4),
    )
    six = ModelConfig.from_hf(CONFIG | {"n_routed_experts": 6, "n_group": 1, "topk_group": 1})
    refused(
        "^num_experts: expected a multiple of the 4 devices along expert, got 6",
        lambda: random_model(six, 0, LAYOUTS[QUICK]()),
    )
