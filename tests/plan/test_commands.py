"""The commands of a plan: the parsers of these commands accept them, and they ask for the plan."""

from __future__ import annotations

import ast
import shlex
from typing import Any

import pytest

from dsv3_jax import presets
from dsv3_jax.cli.main import parser
from dsv3_jax.cli.serve import check_arguments
from dsv3_jax.plan.commands import commands
from dsv3_jax.plan.deployment import Deployment, EngineSettings
from dsv3_jax.plan.target import Target
from dsv3_jax.serve_ray.settings import AppSettings


def deployment(**changes: Any) -> Deployment:
    settings: dict[str, Any] = {
        "config": presets.DEEPSEEK_V3, "target": Target.parse("h200x8"),
        "layout_name": "dp_attention_ep", "batch": 64, "context": 4096, "quantization": "fp8",
        **changes,
    }  # fmt: skip
    return Deployment(**settings)


def parsed(command: str) -> Any:
    """Parses a command of ours as the shell and ``dsv3`` do."""
    words = shlex.split(command)
    while "=" in words[0]:
        words.pop(0)
    assert words.pop(0) == "dsv3"
    arguments = parser().parse_args(words)
    if arguments.command == "serve":
        check_arguments(arguments)
    return arguments


EVERY_SETTING = {
    "activations": "float8",
    "exchange": "one_sided",
    "float8_dispatch": True,
    "mtp": True,
    "engine": EngineSettings(cache_tokens=65536),
}


def test_a_server_of_every_setting():
    (command,) = commands(deployment(**EVERY_SETTING), "deepseek-r1")
    arguments = parsed(command)
    assert {
        name: getattr(arguments, name)
        for name in (
            *("model", "layout", "quantization", "activations", "exchange", "float8_dispatch"),
            *("draft", "max_len", "max_running", "cache_tokens", "cache_dtype"),
        )
    } == {
        "model": "deepseek-ai/DeepSeek-R1", "layout": "dp_attention_ep", "quantization": "fp8",
        "activations": "float8", "exchange": "one_sided", "float8_dispatch": True, "draft": "mtp",
        "max_len": 4096, "max_running": 64, "cache_tokens": 65536, "cache_dtype": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "quantization", "converts"),
    [
        ("deepseek-v3", "bf16", False),
        ("deepseek-v3", "fp8", False),
        ("deepseek-v3", "int4", True),
        ("moonlight-16b", "bf16", False),
        ("moonlight-16b", "fp8", True),
    ],
)
def test_weights_that_are_not_published_are_converted_first(preset, quantization, converts):
    config, hub = presets.get(preset), presets.HUB_NAMES[preset][0]
    *before, serve = commands(
        deployment(config=config, quantization=quantization, context=2048), preset
    )
    arguments = parsed(serve)
    assert arguments.quantization == (None if quantization == "bf16" else quantization)
    assert len(before) == converts
    if converts:
        convert = parsed(before[0])
        assert (convert.source, convert.to) == (hub, quantization)
        assert str(convert.destination) == arguments.model
    else:
        assert arguments.model == hub


def test_a_directory_and_a_name_on_the_hub():
    for model, source in [
        ("/models/my v3", "/models/my v3"),
        ("deepseek-ai/deepseek-v3-base", "deepseek-ai/DeepSeek-V3-Base"),
        ("DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3-0324"),
        ("demo", "demo"),
    ]:
        (command,) = commands(deployment(), model)
        assert parsed(command).model == source


def test_a_layout_over_fewer_devices_than_a_host_has():
    (command,) = commands(deployment(target=Target.parse("h200x4")), "deepseek-v3")
    assert command.startswith("CUDA_VISIBLE_DEVICES=0,1,2,3 dsv3 serve ")
    assert parsed(command).layout == "dp_attention_ep"
    single = deployment(target=Target.parse("h200"), layout_name="single")
    (command,) = commands(single, "deepseek-v3")
    assert command.startswith("dsv3 serve ")
    assert parsed(command).layout is None


@pytest.mark.parametrize(
    ("target", "layout", "hosts", "resources"),
    [
        ("2x8xH200", "dp_attention_ep", 2, {"num_gpus": 8}),
        ("v5p-128", "tpu_pod", 16, {"TPU": 4}),
        ("tpu7x-128", "tpu_pod", 16, {"TPU": 4}),
    ],
)
def test_several_hosts_are_those_of_ray(target, layout, hosts, resources):
    changes = EVERY_SETTING | {"exchange": "all_to_all"}
    planned = deployment(target=Target.parse(target), layout_name=layout, batch=128, **changes)
    (command,) = commands(planned, "deepseek-v3")
    python, flag, code = shlex.split(command)
    assert (python, flag) == ("python", "-c")
    (call,) = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "build_app"
    ]
    names: dict[str, Any] = {"dict": dict}
    given = {
        each.arg: eval(ast.unparse(each.value), {"__builtins__": {}}, names)
        for each in call.keywords
    }
    settings = AppSettings.of({"model": ast.literal_eval(call.args[0]), **given})
    assert (settings.model, settings.hosts) == ("deepseek-ai/DeepSeek-V3", hosts)
    assert settings.resources == resources
    arguments = settings.arguments
    assert (arguments.layout, arguments.draft, arguments.float8_dispatch) == (layout, "mtp", True)


def test_every_preset_has_names_on_the_hub():
    assert presets.HUB_NAMES.keys() == presets.PRESETS.keys()
    for preset, names in presets.HUB_NAMES.items():
        for name in names:
            assert presets.name_of(name) == presets.name_of(name.lower()) == preset
            assert presets.get(name) == presets.PRESETS[preset]
    assert presets.name_of("gpt-2") is None
