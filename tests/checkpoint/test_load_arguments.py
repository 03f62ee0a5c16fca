"""Arguments of `load`, refusals that it shares with `verify`, and end tokens."""

import json
import re

import jax
import pytest

import dsv3_jax
from dsv3_jax.checkpoint.check import check_tensors
from dsv3_jax.checkpoint.open_checkpoint import open_checkpoint
from dsv3_jax.checkpoint.verify import verify
from sharding import make_layout
from tests.checkpoint.files import CONFIG, SINGLE, Stored, edit, edit_json
from tests.checkpoint.values import no_array_made, small_config
from tests.support.tokenizer_files import EOS, NAMES, Shape, write_shape

NORM = "model.layers.0.input_layernorm.weight"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mtp": "no"}, "mtp: expected True or False, got 'no'"),
        ({"mtp": None}, "mtp: expected True or False, got None"),
        ({"mtp": 0}, "mtp: expected True or False, got 0"),
        ({"layout": "pipeline"}, "layout: expected one of single, "),
        ({"layout": 3}, "layout: expected the name of a layout, a Layout or None, got 3"),
        ({"mesh": "tp_attention_ep"}, "mesh: expected a jax.sharding.Mesh or None, got 'tp_"),
        ({"rules": "x"}, "rules: expected sharding.Rules or None, got 'x'"),
        ({"placement": [1]}, "placement: expected a sharding.Placement or None, got [1]"),
        ({"dtype": "demo"}, "dtype: expected one of bfloat16"),
        ({"quantization": True}, "quantization: expected 'fp8', 'int8', 'int4' or None, got True"),
        ({"quantization": ["fp8"]}, "quantization: expected 'fp8', 'int8', 'int4' or None"),
    ],
)
def test_arguments_of_another_kind(arguments, named):
    with no_array_made(), pytest.raises(ValueError, match=re.escape(named)) as caught:
        dsv3_jax.load("demo", **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [None, 3, b"demo", make_layout("single")])
def test_a_model_of_another_kind(model):
    with pytest.raises(ValueError, match=r"\Amodel: expected 'demo', a directory, or a Hub name"):
        dsv3_jax.load(model)


def test_a_layout_by_name(checkpoint):
    directory, _ = checkpoint()
    named, _ = dsv3_jax.load(directory, layout="single")
    made, _ = dsv3_jax.load(directory, layout=make_layout("single"))
    assert named.lm_head.weight.sharding == made.lm_head.weight.sharding
    assert isinstance(named.lm_head.weight.sharding, jax.sharding.NamedSharding)


def half(tensors):
    tensors[NORM] = Stored("F16", tensors[NORM].shape, tensors[NORM].data)


def wide(tensors):
    tensors[NORM] = Stored("F64", tensors[NORM].shape, 4 * tensors[NORM].data)


@pytest.mark.parametrize(
    ("written", "damage", "named"),
    [
        ("bfloat16", half, f"{NORM}: expected F32 or BF16, got F16"),
        ("bfloat16", wide, f"{NORM}: expected F32 or BF16, got F64"),
        ("fp8", "quantization_config", "config.json has no quantization_config"),
    ],
)
@pytest.mark.parametrize("mtp", [True, False])
def test_load_refuses_the_same_damage_as_verify(checkpoint, written, damage, named, mtp):
    directory, _ = checkpoint(dtype=written)
    if isinstance(damage, str):
        edit_json(directory / CONFIG, lambda config: config.pop(damage))
    else:
        edit(directory / SINGLE, damage)
    with no_array_made(), pytest.raises(ValueError, match=re.escape(named)) as ours:
        dsv3_jax.load(directory, mtp=mtp)
    opened = open_checkpoint(directory)
    with pytest.raises(ValueError, match=re.escape(named)) as theirs:
        check_tensors(opened.config, opened.arrays)
    assert str(ours.value) == str(theirs.value)
    assert verify(opened).findings


class TestAbsentTokens:
    """BOS and end tokens that config.json lacks come from the file that has them."""

    def write(self, directory, config, generation=None, names=None):
        def change(content):
            for name in ("bos_token_id", "eos_token_id"):
                content.pop(name)
            content |= config

        edit_json(directory / "config.json", change)
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        if names is not None:
            write_shape(directory, Shape(names, ""))
        loaded = dsv3_jax.load(directory)[0].config
        return loaded.bos_token_id, loaded.eos_token_id

    @pytest.mark.parametrize("config", [{}, {"bos_token_id": None, "eos_token_id": None}])
    @pytest.mark.parametrize(
        ("generation", "names", "tokens"),
        [
            (None, NAMES, (0, (1,))),
            ({"eos_token_id": [7, 9]}, NAMES, (0, (7, 9))),
            ({"bos_token_id": 5, "eos_token_id": 9}, {}, (5, (9,))),
            ({"eos_token_id": 9}, {"eos_token": EOS}, (None, (9,))),
            (None, {"eos_token": EOS, "bos_token": None}, (None, (1,))),
        ],
    )
    def test_are_found(self, checkpoint, config, generation, names, tokens):
        directory, _ = checkpoint(small_config(vocab_size=270))
        assert self.write(directory, config, generation, names) == tokens

    def test_those_of_config_json_come_first(self, checkpoint):
        directory, _ = checkpoint(small_config(vocab_size=270))
        own = {"bos_token_id": 3, "eos_token_id": 4}
        assert self.write(directory, own, {"bos_token_id": 5}, NAMES) == (3, (4,))

    def test_nobody_names_an_end(self, checkpoint, caplog):
        """transformers would take 0 and 1, which are ordinary tokens in some vocabularies."""
        directory, _ = checkpoint()
        assert self.write(directory, {}) == (None, ())
        assert caplog.messages == [
            f"{directory}: no file names an end token, so that texts end only at their limits"
        ]

    def test_an_id_outside_the_vocabulary(self, checkpoint):
        directory, _ = checkpoint()
        with pytest.raises(ValueError, match=r"generation_config\.json: bos_token_id: expected"):
            self.write(directory, {}, {"bos_token_id": 160})


class TestEndTokens:
    """The end tokens are those of generation_config.json, as in transformers."""

    def write(self, directory, content):
        (directory / "generation_config.json").write_text(json.dumps(content))

    @pytest.mark.parametrize(
        ("content", "ends"),
        [
            ({"eos_token_id": [7, 9], "temperature": 0.6, "do_sample": True}, (7, 9)),
            ({"eos_token_id": 5}, (5,)),
            ({"eos_token_id": [5, 5]}, (5,)),
            ({"eos_token_id": None}, None),
            ({"temperature": 0.6}, None),
        ],
    )
    def test_are_the_models(self, checkpoint, content, ends):
        directory, _ = checkpoint()
        own = dsv3_jax.ModelConfig.from_hf(directory).eos_token_id
        assert own not in ((5,), (7, 9))
        self.write(directory, content)
        assert dsv3_jax.load(directory)[0].config.eos_token_id == (ends or own)

    @pytest.mark.slow
    def test_end_generation(self, checkpoint):
        directory, _ = checkpoint()
        model, _ = dsv3_jax.load(directory)
        settings = {"max_new_tokens": 6, "ignore_eos": True}
        generator = dsv3_jax.Generator(model, None, max_len=16)
        tokens = generator.generate([[3, 4]], **settings)[0].tokens
        self.write(directory, {"eos_token_id": [tokens[2]]})
        model, _ = dsv3_jax.load(directory)
        out = dsv3_jax.Generator(model, None, max_len=16).generate([[3, 4]], max_new_tokens=6)[0]
        assert out.tokens == tokens[: tokens.index(tokens[2]) + 1]
        assert out.finish_reason == "stop"

    @pytest.mark.parametrize("eos", [[], "</s>", [True], -1, 160, [5, 1.0], {"id": 5}])
    def test_that_are_no_ids(self, checkpoint, eos):
        directory, _ = checkpoint()
        self.write(directory, {"eos_token_id": eos})
        with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id: expected"):
            dsv3_jax.load(directory)

    @pytest.mark.parametrize("content", ["[]", "{", "5"])
    def test_of_a_file_that_is_no_object(self, checkpoint, content):
        directory, _ = checkpoint()
        (directory / "generation_config.json").write_text(content)
        with pytest.raises(ValueError, match=r"generation_config\.json.* (JSON|object)"):
            dsv3_jax.load(directory)
