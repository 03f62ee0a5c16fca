"""Selects the parser of a model's tool calls."""

from __future__ import annotations

from dsv3_jax.server.parsers.deepseek_v3 import DeepSeekV3Parser, DeepSeekV31Parser
from dsv3_jax.server.parsers.deepseek_v32 import DeepSeekV32Parser
from dsv3_jax.server.parsers.kimi_k2 import KimiK2Parser
from dsv3_jax.server.parsers.tool_parser import ToolParser
from dsv3_jax.tokenizer import Tokenizer

TOOL_PARSERS: tuple[type[ToolParser], ...] = (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    DeepSeekV32Parser,
    KimiK2Parser,
)


def find_tool_parser(tokenizer: Tokenizer) -> type[ToolParser]:
    """Returns the parser for the markup that the chat template writes."""
    if "tools" not in tokenizer.chat_template_variables:
        raise ValueError(
            "tools: expected none, as the chat template of this model does not describe tools; dsv3"
            " serve --chat-template selects another one, such as deepseek-v3"
        )
    source = tokenizer.chat_template or ""
    if "<｜DSML｜invoke" in source:
        return DeepSeekV32Parser
    if "<|tool_call_argument_begin|>" in source:
        return KimiK2Parser
    if DeepSeekV3Parser.call_begin in source:
        return DeepSeekV3Parser if "```json" in source else DeepSeekV31Parser
    raise ValueError(
        "tools: expected none, as the server does not know the format in which the chat template"
        " of this model writes tool calls; it knows those of DeepSeek-V3, V3.1 and V3.2, and of"
        " Kimi-K2"
    )
