"""A model on eight devices in every named layout: equal logits, equal tokens."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax import presets
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layer_collectives import layer_collectives, read_collectives
from dsv3_jax.layers.logical_axes import check_layout, parameter_shardings
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
from dsv3_jax.quantization import BlockQuantization
from sharding import (
    DEFAULT_RULES,
    PRESETS,
    Layout,
    Placement,
    Rules,
    abstract_layout,
    make_layout,
    make_mesh,
)
from tests.generation.fragments import write_tokenizer
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.running import forward

CONFIG = tiny_config(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8)
BOTH = Rules({**DEFAULT_RULES.table, "batch": ("data", "expert"), "expert": ("data", "expert")})
LAYOUTS = {
    "single": lambda: make_layout("single"),
    "dp_attention_ep": lambda: make_layout("dp_attention_ep"),
    "dp_attention_ep, all_to_all": lambda: make_layout("dp_attention_ep", exchange="all_to_all"),
    "dp_attention_ep, one_sided": lambda: make_layout("dp_attention_ep", exchange="one_sided"),
    "dp_attention_ep, 2 micro-batches": lambda: make_layout(
        "dp_attention_ep", devices=jax.devices()[:4], exchange="all_to_all", micro_batches=2
    ),
    "tensor_parallel": lambda: make_layout("tensor_parallel"),
    "tp_attention_ep": lambda: make_layout("tp_attention_ep"),
    "context_parallel": lambda: make_layout("context_parallel"),
    "tpu_pod, groups of four": lambda: Layout(
        make_mesh(expert=2, tensor=4), PRESETS["tpu_pod"].rules, "all_to_all"
    ),
    "train": lambda: make_layout("train", expert_devices=4),
    "data 2, expert 2, tensor 2": lambda: Layout(make_mesh(data=2, expert=2, tensor=2)),
    "the same, experts by data too": lambda: Layout(
        make_mesh(data=2, expert=2, tensor=2), BOTH, "all_to_all"
    ),
    "data 8": lambda: Layout(make_mesh(data=8)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    home = tmp_path_factory.mktemp("eight")
    write_checkpoint(home, CONFIG, random_tensors(CONFIG))
    return home


LoadIn = Callable[..., DeepSeekV3]


@pytest.fixture(scope="module")
def load_in(directory) -> LoadIn:
    """The model in a layout of LAYOUTS, loaded once; for tests that do not change it."""

    @functools.cache
    def load(name: str | None, *, mtp: bool = True) -> DeepSeekV3:
        layout = None if name is None else LAYOUTS[name]()
        return dsv3_jax.load(directory, layout=layout, mtp=mtp)[0]

    return load


@pytest.fixture(scope="module")
def single(load_in):
    return load_in(None)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 160, (8, 9))


@pytest.fixture(scope="module")
def want(single, tokens):
    return forward(single, tokens)


def assert_same(got, want):
    """Compares logits, MTP logits and routing counts."""
    layers = len(got[1].mtp_logits)
    assert layers in (0, 1)
    wanted = want[0], *want[1].mtp_logits[:layers]
    for x, y in zip((got[0], *got[1].mtp_logits), wanted, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert np.abs(x - y).max() <= 1e-5 * np.abs(y).max()
    counts = np.asarray(want[1].routing_counts)[: 1 + layers]
    np.testing.assert_array_equal(got[1].routing_counts, counts)
    for stats, expected in zip(got[1].routing, want[1].routing[: 1 + layers], strict=True):
        np.testing.assert_array_equal(stats.experts, expected.experts)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# An MTP layer is sharded like other layers: it is compared in the layouts of each kind of exchange.
WITH_MTP = {
    "single",
    "dp_attention_ep",
    "dp_attention_ep, all_to_all",
    "dp_attention_ep, one_sided",
    "dp_attention_ep, 2 micro-batches",
    "tensor_parallel",
    "tpu_pod, groups of four",
    "train",
    "data 2, expert 2, tensor 2",
}
QUICK = "dp_attention_ep", "data 2, expert 2, tensor 2"


@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in LAYOUTS])
def test_logits(load_in, tokens, want, name):
    assert_same(forward(load_in(name, mtp=name in WITH_MTP), tokens), want)


@pytest.mark.slow
def test_partial_sums_in_bfloat16(directory, tokens, want):
    """Each of up to K terms of a layer's sum is rounded once, by at most half of 2^-8 of itself."""
    layout = make_layout("dp_attention_ep", exchange="all_to_all", bfloat16_combine=True)
    got = forward(dsv3_jax.load(directory, layout=layout, mtp=False)[0], tokens)[0]
    error = np.abs(np.asarray(got) - np.asarray(want[0])).max() / np.abs(np.asarray(want[0])).max()
    assert 1e-5 < error < 2**-8


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["dp_attention_ep", "dp_attention_ep, all_to_all", "data 2, expert 2, tensor 2"]
)
def test_all_tokens_choose_the_same_experts(directory, tokens, name):
    """The experts chosen on one device, and no others, are chosen on all."""

    def biased(name, mtp=True):
        layout = None if name is None else LAYOUTS[name]()
        model = dsv3_jax.load(directory, layout=layout, mtp=mtp)[0]
        for layer in model.moe_layers():
            bias = layer.gate.e_score_correction_bias
            bias.set_value(bias[...].at[jnp.arange(3)].add(100.0))
        return forward(model, tokens)

    want = biased(None)
    assert (np.asarray(want[1].routing_counts)[0] > 0).sum() == 3
    assert_same(biased(name, mtp=name in WITH_MTP), want)


@pytest.fixture(scope="module")
def generated(single):
    """Tokens of one device without speculation, which does not change tokens."""
    return tokens_of(single, None)


def tokens_of(model, draft):
    prompts = [[5, 9, 2], [7] * 11, [1, 2, 3, 4, 5]]
    settings = {"max_new_tokens": 12, "ignore_eos": True, "draft": draft, "draft_depth": 2}
    generator = Generator(model, None, 64, batch_sizes=(3,), prefill_chunk=4)
    return [completion.tokens for completion in generator.generate(prompts, **settings)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("dp_attention_ep, 2 micro-batches", "mtp"),
        ("tp_attention_ep", None),
        ("data 2, expert 2, tensor 2", "mtp"),
    ],
)
def test_generated_tokens(load_in, generated, name, draft):
    assert tokens_of(load_in(name), draft) == generated


def test_batch_sizes_are_multiples_of_the_devices(load_in, tokens):
    model = load_in("dp_attention_ep")
    assert Generator(model, None, 64, batch_sizes=(1, 4, 9)).batch_sizes == (8, 16)
    with pytest.raises(ValueError, match="expected a size that divides over 8 devices, got 7"):
        forward(model, tokens[:7])
    model = load_in("dp_attention_ep, 2 micro-batches", mtp=False)
    assert Generator(model, None, 64, batch_sizes=(1, 9)).batch_sizes == (8, 16)
    with pytest.raises(ValueError, match="4 devices with 2 micro-batches each, got 4"):
        forward(model, tokens[:4])


# ---- placements ----------------------------------------------------------------------------------


def placements(*replicas):
    """Placements for two MoE layers, the second MTP's: the identity, then balanced ones."""
    loads = np.random.default_rng(1).zipf(1.5, (2, 8))
    yield Placement.identity(2, 8, 16)
    for count in replicas:
        yield Placement.balanced(loads, count, 4, 2, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        slow(None, (16,)),  # one program with 16 expert slots, like the next
        ("dp_attention_ep", (16,)),
        slow(None, (8, 24)),  # with 0 and 16 redundant experts
        slow("dp_attention_ep", (8, 24)),
        slow("dp_attention_ep, all_to_all", (8, 16, 24)),
    ],
)
def test_logits_do_not_depend_on_placement(load_in, tokens, want, name, replicas):
    model = load_in(name)
    for placement in placements(*replicas):
        model = model.place_experts(placement)  # from the previous placement
        assert model.layers[1].mlp.experts.up_proj.weight.shape[0] == placement.phy2log.shape[1]
        assert_same(forward(model, tokens), want)


def test_placed_experts_of_one_device_give_the_same_numbers(single, tokens, want):
    """Placed or not, experts on one device are summed by the same operations in the same order."""
    *_, placement = placements(16)
    logits, aux = forward(single.place_experts(placement), tokens)
    np.testing.assert_array_equal(logits, want[0])
    np.testing.assert_array_equal(aux.mtp_logits[0], want[1].mtp_logits[0])


@pytest.mark.slow
def test_loading_with_a_placement(directory, load_in, tokens, want):
    """8 experts in 16 slots of 8 devices, and in 12 slots of 6 devices, which do not divide 8."""
    for devices, replicas in ((8, 16), (6, 12)):
        layout = make_layout("dp_attention_ep", devices=jax.devices()[:devices])
        placement = Placement.balanced(np.arange(16).reshape(2, 8), replicas, 1, 1, devices)
        model = dsv3_jax.load(directory, layout=layout, placement=placement)[0]
        stack = model.layers[1].mlp.experts.up_proj.weight.get_value()
        assert stack.sharding.shard_shape(stack.shape)[0] == 2
        if devices == 8:
            moved = load_in("dp_attention_ep").place_experts(placement)
            np.testing.assert_array_equal(
                stack, moved.layers[1].mlp.experts.up_proj.weight.get_value()
            )
            assert_same(forward(model, tokens), want)
        else:
            logits, aux = forward(model, tokens[:6])
            for x, y in zip((logits, *aux.mtp_logits), (want[0], *want[1].mtp_logits), strict=True):
                x, y = np.asarray(x), np.asarray(y)[:6]
                assert np.abs(x - y).max() <= 1e-5 * np.abs(y).max()
            pairs = zip(aux.routing, want[1].routing, strict=True)
            chosen = [[np.asarray(x.experts) for x in both] for both in pairs]
            for chosen_of_six, chosen_of_all in chosen:
                np.testing.assert_array_equal(chosen_of_six, chosen_of_all[: len(chosen_of_six)])
            counts = np.bincount(chosen[0][0].ravel(), minlength=8)
            np.testing.assert_array_equal(aux.routing_counts, [counts])
    refused(
        r"^layers\.1\.\S+: expected axis 'expert' to divide over 6 devices",
        lambda: dsv3_jax.load(directory, layout=layout),
    )
    refused(
        "^placement: expected slots that divide over 6 devices, got 16",
        lambda: dsv3_jax.load(directory, layout=layout, placement=Placement.identity(2, 8, 16)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "mtp"])
def test_routing_is_counted(single, tokens, draft):
    """Counts match a pass over the whole text: every token but the last, plus rejected drafts."""
    settings = {"max_new_tokens": 5, "ignore_eos": True, "draft": draft}
    generator = Generator(single, None, 64, prefill_chunk=4, batch_sizes=(4,), count_routing=True)
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    generator.warm_up(2, draft=draft)  # counts nothing
    out = generator.generate(prompts, **settings)
    counts = generator.take_routing_counts()
    drafts = sum(c.speculation.drafted[0] - c.speculation.accepted[0] for c in out) if draft else 0
    K, texts = (
        CONFIG["num_experts_per_tok"],
        [p + c.tokens for p, c in zip(prompts, out, strict=True)],
    )
    assert counts[0].sum() == K * (sum(len(text) - 1 for text in texts) + drafts)
    assert (counts[1].sum() > 0) == (draft is not None)
    if draft is None:
        padded = np.zeros_like(tokens)  # a shape that is compiled already
        for row, text in zip(padded[: len(texts)], texts, strict=True):
            row[: len(text) - 1] = text[:-1]
        chosen = np.asarray(forward(single, padded)[1].routing[0].experts).reshape(8, 9, K)
        whole = [chosen[row, : len(text) - 1].ravel() for row, text in enumerate(texts)]
        np.testing.assert_array_equal(counts[0], np.bincount(np.concatenate(whole), minlength=8))
    assert not generator.take_routing_counts().any()
    with pytest.raises(ValueError, match="count_routing: expected True"):
        Generator(single, None, 64).take_routing_counts()


def num_compiled(generator: Generator) -> int:
    return sum(len(programs._compiled) for programs in generator._programs.values())


@pytest.mark.slow
def test_counted_balanced_and_swapped_while_a_stream_runs(directory, single, tmp_path):
    """The placement changes between two pieces, by the counts so far, without compiling."""
    layout = make_layout("dp_attention_ep")
    model = dsv3_jax.load(directory, layout=layout, placement=Placement.identity(2, 8, 16))[0]
    tokenizer = write_tokenizer(tmp_path)  # the stream yields text
    generator = Generator(
        model, tokenizer, 64, prefill_chunk=4, stride=4, batch_sizes=(8,), count_routing=True
    )
    settings = {"max_new_tokens": 16, "ignore_eos": True}
    want = Generator(single, tokenizer, 64, prefill_chunk=4).generate([[3, 1, 4]], **settings)
    assert generator.generate([[3, 1, 4]], **settings)[0].tokens == want[0].tokens
    generator.take_routing_counts()
    compiled = num_compiled(generator)
    tokens, placements = [], []
    for piece in generator.stream([3, 1, 4], **settings):
        tokens += piece.tokens
        placements.append(Placement.balanced(generator.take_routing_counts(), 16, 4, 2, 8))
        model = model.place_experts(placements[-1])
        generator.use(model)
    assert tokens == want[0].tokens
    assert len({np.asarray(p.phy2log).tobytes() for p in placements}) > 2
    assert num_compiled(generator) == compiled
    with pytest.raises(ValueError, match="model: expected the layout of the model in use"):
        generator.use(single)


# ---- collectives ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dense", "moe"),
    [
        ("dp_attention_ep", {}, {"all-gather": 1, "reduce-scatter": 1}),
        # The kernel's reference: packed tokens, their counts, and partial sums.
        slow("dp_attention_ep, one_sided", {}, {"all-to-all": 3}),
        # Each micro-batch has its own exchange.
        slow("dp_attention_ep, 2 micro-batches", {}, {"all-to-all": 4}),
        slow("tensor_parallel", {"all-reduce": 2}, {"all-reduce": 2}),
        slow("tp_attention_ep", {"all-reduce": 2}, {"all-reduce": 2}),
        slow(
            "tpu_pod, groups of four",
            {"all-reduce": 2},
            {"all-reduce": 2, "all-to-all": 2},
        ),
        slow(
            "context_parallel",
            {"all-gather": 1, "all-reduce": 1},
            {"all-gather": 1, "all-reduce": 1},
        ),
    ],
)
def test_collectives(load_in, name, dense, moe):
    """Data-parallel attention has none, shared tokens one, experts one dispatch and one combine."""
    model = load_in(name, mtp=name in WITH_MTP)
    assert Counter(each.name for each in layer_collectives(model, 0)) == dense
    assert Counter(each.name for each in layer_collectives(model, 1)) == moe


def test_groups_of_collectives():
    """XLA writes groups as a list, a shape, a transposed shape, or not at all for all devices."""
    text = """
      %a = f32[2]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
      %b = (f32[2], f32[4]) all-gather-start(%x), replica_groups=[2,2]<=[4], dimensions={0}
      %c = f32[1]{0} reduce-scatter(%x), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
      %d = f32[2]{0} all-to-all(%x), channel_id=1
      %e = f32[2]{0} add(%x, %all-reduce.1)
    """
    assert [(each.name, each.groups) for each in read_collectives(text, 4)] == [
        ("all-reduce", ((0, 1), (2, 3))),
        ("all-gather", ((0, 1), (2, 3))),
        ("reduce-scatter", ((0, 2), (1, 3))),
        ("all-to-all", ((0, 1, 2, 3),)),
    ]


# ---- refusals ------------------------------------------------------------------------------------


def refused(pattern, run):
    with pytest.raises(ValueError, match=pattern) as caught:
        run()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["single", "tensor_parallel"])
def test_bfloat16_combine_needs_sharded_experts(name):
    refused(
        "^bfloat16_combine: expected rules that shard experts",
        lambda: make_layout(name, bfloat16_combine=True),
    )


def test_one_sided_needs_devices_in_order():
    backwards = make_layout("dp_attention_ep", devices=jax.devices()[::-1], exchange="one_sided")
    refused(
        "^one_sided: expected devices 0 to 7 in row-major order",
        lambda: check_layout(ModelConfig.from_hf(CONFIG), backwards),
    )


def test_layouts_that_are_refused(directory, load_in):
    four = ModelConfig.from_hf(CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 4})
    refused(
        "^num_attention_heads: expected whole heads on each of 8 devices .* tensor, got 4",
        lambda: check_layout(four, make_layout("tensor_parallel")),
    )
    hidden = Rules({**dict.fromkeys(DEFAULT_RULES.table), "hidden": "tensor"})
    hidden = Layout(make_mesh(tensor=8), hidden)
    config = ModelConfig.from_hf(CONFIG)
    refused(
        "^rules: expected axis 'hidden' on every device whole", lambda: check_layout(config, hidden)
    )
    order = Rules({**DEFAULT_RULES.table, "expert": ("expert", "data")})
    refused(
        "^rules: expected experts over axes of the batch first",
        lambda: Layout(make_mesh(data=4, expert=2), order),
    )
    refused("^micro_batches: expected 1 or more", lambda: make_layout("single", micro_batches=0))
    refused("^name: expected one of single, dp_", lambda: make_layout("pipeline"))
    refused(
        "^deepseek_prefill_ep32: expected 32 devices, got 8",
        lambda: make_layout("deepseek_prefill_ep32"),
    )
    layout = make_layout("dp_attention_ep")
    refused(
        "^layout: expected no mesh with a layout",
        lambda: dsv3_jax.load(directory, mesh=layout.mesh, layout=layout),
    )
    model = load_in("dp_attention_ep")
    refused(
        "^placement: expected 2 layers of 8", lambda: model.place_experts(Placement.identity(1, 8))
    )
    refused(
        "^placement: expected slots that divide over 8 devices, got 9",
        lambda: model.place_experts(Placement.identity(2, 8, 9)),
    )


def test_every_preset_takes_deepseek_v3():
    """Lays out each kind of layer in float8, on the number of devices that the preset is for."""
    config = dataclasses.replace(
        presets.DEEPSEEK_V3, num_hidden_layers=4, num_nextn_predict_layers=0
    )
    model = abstract_model(config, dtype=jnp.bfloat16, quantization=BlockQuantization())
    for preset in PRESETS.values():
        if preset.redundant_experts:
            continue  # for other models' numbers of experts
        sizes = {"data": 1, "expert": 1, "tensor": 1} | preset.mesh_sizes(8)
        mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        parameter_shardings(model, mesh, preset.rules, BlockQuantization())
    pod = abstract_layout("tpu_pod", 128)
    parameter_shardings(model, pod.mesh, pod.rules, BlockQuantization())
    refused("^tpu_pod: expected a multiple of 8", lambda: abstract_layout("tpu_pod", 12))


@pytest.mark.parametrize(("devices", "whole"), [(16, True), (32, False)])
def test_blocks_of_experts_over_tensor_devices(devices, whole):
    """2,048 columns over 16 devices give one block of 128 each, over 32 half a block. Other engines
    run that with the wrong scales."""
    config = dataclasses.replace(
        presets.DEEPSEEK_V3, num_hidden_layers=4, num_nextn_predict_layers=0
    )
    model = abstract_model(config, dtype=jnp.bfloat16, quantization=BlockQuantization())
    mesh = jax.sharding.AbstractMesh((1, 1, devices), ("data", "expert", "tensor"))
    rules = Rules({**dict.fromkeys(DEFAULT_RULES.table), "expert_ffn": "tensor"})
    if whole:
        parameter_shardings(model, mesh, rules, BlockQuantization())
        return
    refused(
        r"experts\.down_proj\.weight: expected whole blocks of 128 along axis 'expert_ffn'",
        lambda: parameter_shardings(model, mesh, rules, BlockQuantization()),
    )
