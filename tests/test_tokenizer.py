"""The tokenizer as a checkpoint's files describe it: BOS, chat templates, round trips."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

import dsv3_jax
from dsv3_jax.tokenizer import Tokenizer

BOS, EOS, USER = 0, 1, 2
WORDS = {"<bos>": BOS, "<eos>": EOS, "<user>": USER, "hello": 3, "world": 4, "unused": 9}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<user>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<eos>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "user", "content": "world"}]


def write(
    directory: Path,
    *,
    post_processor: bool = False,
    config: dict[str, Any] | None = None,
    jinja: str | None = None,
) -> Tokenizer:
    """A tokenizer of whole words, with BOS written by itself, by its config, by both or neither."""
    made = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="unused"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.Fuse()
    special = [tokenizers.AddedToken(t, special=True) for t in ("<bos>", "<eos>", "<user>")]
    made.add_special_tokens(special)
    made.add_tokens([tokenizers.AddedToken("world", special=False)])
    if post_processor:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    made.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if jinja is not None:
        (directory / "chat_template.jinja").write_text(jinja, "utf-8")
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(Path(dsv3_jax.__file__).parent / "demo")


WITH_BOS = {"add_bos_token": True, "bos_token": "<bos>", "eos_token": "<eos>"}


class TestBos:
    @pytest.mark.parametrize("text", ["hello world", "<bos>hello world", "<bos> hello world"])
    @pytest.mark.parametrize("post_processor", [False, True])
    def test_once(self, tmp_path, post_processor, text):
        tokenizer = write(tmp_path, post_processor=post_processor, config=WITH_BOS)
        assert tokenizer.encode(text) == [BOS, 3, 4]

    @pytest.mark.parametrize("post_processor", [False, True])
    def test_not_without_special_tokens(self, tmp_path, post_processor):
        tokenizer = write(tmp_path, post_processor=post_processor, config=WITH_BOS)
        assert tokenizer.encode("hello world", add_special_tokens=False) == [3, 4]
        assert tokenizer.encode("<bos>hello", add_special_tokens=False) == [BOS, 3]
        assert tokenizer.encode("<bos><bos>", add_special_tokens=False) == [BOS, BOS]

    def test_of_the_post_processor_alone(self, tmp_path):
        tokenizer = write(tmp_path, post_processor=True, config={"bos_token": "<bos>"})
        assert tokenizer.encode("hello") == tokenizer.encode("<bos>hello") == [BOS, 3]

    @pytest.mark.parametrize(
        "config",
        [
            None,
            {},
            {"add_bos_token": False, "bos_token": "<bos>"},
            {"add_bos_token": True},
            {"add_bos_token": True, "bos_token": None},
        ],
    )
    def test_none_where_the_checkpoint_asks_for_none(self, tmp_path, config):
        assert write(tmp_path, config=config).encode("hello world") == [3, 4]

    def test_of_an_empty_text(self, tmp_path):
        assert write(tmp_path, config=WITH_BOS).encode("") == [BOS]

    @pytest.mark.parametrize("spelling", ["<bos>", {"__type": "AddedToken", "content": "<bos>"}])
    def test_spelled_as_text_or_as_added_token(self, tmp_path, spelling):
        config = {"add_bos_token": True, "bos_token": spelling, "eos_token": spelling}
        tokenizer = write(tmp_path, config=config)
        assert tokenizer.bos_token == tokenizer.eos_token == "<bos>"
        assert tokenizer.bos_token_id == tokenizer.eos_token_id == BOS
        assert tokenizer.encode("hello") == [BOS, 3]

    def test_unnamed(self, tmp_path):
        tokenizer = write(tmp_path)
        assert tokenizer.bos_token_id is tokenizer.eos_token_id is None

    def test_demo(self, demo):
        ids = demo.encode("def f(x):")
        assert ids[0] == demo.bos_token_id == 0
        assert 0 not in ids[1:]
        assert demo.encode("def f(x):", add_special_tokens=False) == ids[1:]


class TestVocabulary:
    def test_size_counts_gaps(self, tmp_path):
        assert write(tmp_path).vocab_size == 10  # ids 5 to 8 are nobody's

    def test_size_of_demo(self, demo):
        assert demo.vocab_size == 2048

    def test_special_token_id(self, tmp_path):
        tokenizer = write(tmp_path)
        assert [tokenizer.special_token_id(t) for t in ("<bos>", "<user>")] == [BOS, USER]
        # Plain words, added ones that are not special, parts of special ones, nothing at all.
        for text in ("hello", "world", "<bos", "<bos> ", "<none>", ""):
            assert tokenizer.special_token_id(text) is None

    def test_special_tokens_are_left_out_of_text(self, tmp_path):
        tokenizer = write(tmp_path)
        assert tokenizer.decode([BOS, 3, USER, 4, EOS]) == "helloworld"
        text = tokenizer.decode([BOS, 3, USER, 4], skip_special_tokens=False)
        assert text == "<bos>hello<user>world"


class TestChat:
    @pytest.mark.parametrize("post_processor", [False, True])
    @pytest.mark.parametrize("add_bos_token", [False, True])
    def test_one_bos(self, tmp_path, post_processor, add_bos_token):
        config = WITH_BOS | {"add_bos_token": add_bos_token, "chat_template": TEMPLATE}
        tokenizer = write(tmp_path, post_processor=post_processor, config=config)
        assert tokenizer.chat(MESSAGES) == [BOS, USER, 3, USER, 4, EOS]

    @pytest.mark.parametrize("post_processor", [False, True])
    def test_rendered_text_as_a_prompt_has_one_bos_too(self, tmp_path, post_processor):
        config = WITH_BOS | {"chat_template": TEMPLATE}
        tokenizer = write(tmp_path, post_processor=post_processor, config=config)
        assert tokenizer.encode(tokenizer.render_chat(MESSAGES)) == tokenizer.chat(MESSAGES)

    def test_rendering(self, tmp_path):
        tokenizer = write(tmp_path, config=WITH_BOS | {"chat_template": TEMPLATE})
        assert tokenizer.render_chat(MESSAGES) == "<bos><user>hello<user>world<eos>"
        open_end = tokenizer.render_chat(MESSAGES, add_generation_prompt=False)
        assert open_end == "<bos><user>hello<user>world"
        assert tokenizer.chat(MESSAGES, add_generation_prompt=False)[-1] == 4

    def test_several_templates_by_name(self, tmp_path):
        templates = [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": TEMPLATE},
        ]
        tokenizer = write(tmp_path, config=WITH_BOS | {"chat_template": templates})
        assert tokenizer.chat(MESSAGES) == [BOS, USER, 3, USER, 4, EOS]

    def test_a_file_of_its_own_comes_first(self, tmp_path):
        tokenizer = write(tmp_path, config=WITH_BOS | {"chat_template": "other"}, jinja=TEMPLATE)
        assert tokenizer.chat(MESSAGES) == [BOS, USER, 3, USER, 4, EOS]

    def test_arguments_reach_the_template(self, tmp_path):
        jinja = "{% if thinking %}hello{% else %}world{% endif %}"
        tokenizer = write(tmp_path, config=WITH_BOS, jinja=jinja)
        assert tokenizer.chat(MESSAGES, thinking=True) == [3]
        assert tokenizer.chat(MESSAGES, thinking=False) == tokenizer.chat(MESSAGES) == [4]

    def test_what_published_templates_use(self, tmp_path):
        """Blocks leave no lines or indents behind; loops break; JSON keeps its characters."""
        jinja = (
            "{%- set ns = namespace(n=0) %}\n"
            "{% for m in messages %}\n"
            "    {% if ns.n == 1 %}\n"
            "        {% break %}\n"
            "    {% endif %}\n"
            "    {% set ns.n = ns.n + 1 %}\n"
            "{{ m['content'] | trim }} {{ m | tojson }}\n"
            "{% endfor %}\n"
            "{{ tools | tojson(indent=1) if tools is defined else 'none' }}"
        )
        tokenizer = write(tmp_path, config=WITH_BOS, jinja=jinja)
        messages = [{"content": " <é> "}, {"content": "second"}]
        assert tokenizer.render_chat(messages) == '<é> {"content": " <é> "}\nnone'
        text = tokenizer.render_chat(messages, tools=["a"])
        assert text == '<é> {"content": " <é> "}\n[\n "a"\n]'

    @pytest.mark.parametrize("config", [None, WITH_BOS, {"chat_template": None}])
    def test_no_template(self, tmp_path, config):
        tokenizer = write(tmp_path, config=config)
        with pytest.raises(ValueError, match="no chat template; expected one"):
            tokenizer.chat(MESSAGES)

    def test_no_default_among_several(self, tmp_path):
        config = {"chat_template": [{"name": "tool_use", "template": "tools"}]}
        with pytest.raises(ValueError, match="no chat template"):
            write(tmp_path, config=config).chat(MESSAGES)

    @pytest.mark.parametrize(
        ("jinja", "message"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[7].content.more }}", "refuses these messages"),
            ("{{ 'text' + messages }}", "refuses these messages"),  # a TypeError inside
            ("{{ messages | nofilter }}", "nofilter"),
        ],
    )
    def test_refusals(self, tmp_path, jinja, message):
        with pytest.raises(ValueError, match=message) as error:
            write(tmp_path, config=WITH_BOS, jinja=jinja).chat(MESSAGES)
        assert "\n" not in str(error.value)

    def test_a_broken_template(self, tmp_path):
        with pytest.raises(ValueError, match="not a chat template"):
            write(tmp_path, config=WITH_BOS, jinja="{% for m in messages %}")

    @pytest.mark.parametrize(
        "jinja",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.__class__.__base__.__subclasses__() }}",
            "{{ raise_exception.__globals__.json }}",
            "{{ raise_exception['__code__'].co_names }}",
            "{{ cycler.__init__.__globals__.os.getcwd() }}",
            "{{ (messages | attr('append'))({}) }}",
            "{{ messages.append({'content': 'more'}) }}",
            "{{ messages[0].update({'content': 'other'}) }}",
            "{% set x = messages[0].__setitem__('content', 'x') %}{{ x }}",
        ],
    )
    def test_a_template_is_someone_elses_program(self, tmp_path, jinja):
        """It can neither reach Python's attributes nor change the messages."""
        messages = [dict(m) for m in MESSAGES]
        tokenizer = write(tmp_path, config=WITH_BOS, jinja=jinja)
        with pytest.raises(ValueError, match="refuses these messages"):
            tokenizer.render_chat(messages)
        assert messages == MESSAGES

    def test_demo(self, demo):
        ids = demo.chat([{"role": "user", "content": "print"}])
        text = "<｜begin▁of▁sentence｜><｜User｜>print<｜Assistant｜>"
        assert demo.decode(ids, skip_special_tokens=False) == text
        assert ids[0] == demo.bos_token_id
        assert ids.count(demo.bos_token_id) == 1
        assert ids == demo.encode(text)
        assert demo.decode(ids) == "print"


class TestFiles:
    def test_no_tokenizer_json(self, tmp_path):
        with pytest.raises(ValueError, match=r"expected a tokenizer\.json, found none"):
            Tokenizer(tmp_path)

    @pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "Nothing"}}'])
    def test_not_a_tokenizer(self, tmp_path, content):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
            Tokenizer(tmp_path)

    def test_a_damaged_config(self, tmp_path):
        write(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: not JSON"):
            Tokenizer(tmp_path)


RNG = np.random.default_rng(0)
TEXTS = {
    "code": "def f(x):\n\treturn x  # ok\r\n\n\n    pass   ",
    "base64": base64.b64encode(RNG.bytes(300)).decode(),
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🎉👍🏽 \U0001fae0",
    "cjk": "深度求索は、大規模言語モデル。 한국어 漢字",
    "right to left": "שלום עולם مرحبا",
    "combining": "e\u0301 a\u0308\u0323 \u200b\u2060\ufeff",
    "controls": "".join(map(chr, range(32))) + "\x7f\x85\u2028",
    "spaces": " \u00a0\u3000  \t ",
    "replacement": "\ufffd and \ufffd\ufffd",
    "outermost": "\U0010ffff\ue000\uffff",
    "random": "".join(map(chr, RNG.integers(1, 0xD800, 400))),
    "nearly special": "<｜begin of sentence｜> <|User|> ｜User｜>",
}


@pytest.mark.parametrize("name", TEXTS)
def test_round_trip(demo, name):
    text = TEXTS[name]
    ids = demo.encode(text)
    assert demo.decode(ids) == text
    assert all(5 <= i < demo.vocab_size for i in ids[1:]), "no text makes a special token"
    # Any cut may fall inside a character, but never loses what stands before it.
    for cut in range(1, len(ids)):
        assert text.startswith(demo.decode(ids[:cut]).rstrip("\ufffd"))


def test_any_bytes_decode(demo):
    for _ in range(20):
        ids = RNG.integers(0, demo.vocab_size, 50).tolist()
        text = demo.decode(ids)
        assert text.encode("utf-8").decode("utf-8") == text
    assert demo.decode([]) == ""
