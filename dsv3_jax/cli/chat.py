"""``dsv3 chat``: a conversation in the terminal.

This module checks what can be wrong with a call, and connects to a server or loads a model.
:mod:`dsv3_jax.cli.conversation` does the rest.
"""

from __future__ import annotations

import argparse
import contextlib
from numbers import Integral

from dsv3_jax.cli.bench import check_url
from dsv3_jax.cli.conversation import Conversation
from dsv3_jax.cli.flags import check_weights, read_api_key
from dsv3_jax.cli.generate import check_text
from dsv3_jax.cli.serve import depth_of, draft_of
from dsv3_jax.generation.settings import check, check_settings


def run(arguments: argparse.Namespace) -> None:
    """Runs the command until ``/exit``, the end of the input, or Ctrl-D."""
    sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    new_tokens = arguments.max_new_tokens
    check_settings(
        max_new_tokens=new_tokens,
        draft=draft_of(arguments),
        draft_depth=depth_of(arguments),
        **sampling,
    )
    if arguments.max_len is not None:
        check("--max-len", arguments.max_len, "an integer of at least 2", Integral, 2)
        if arguments.url is not None:
            raise ValueError("--max-len: expected no --url with it, whose server has its own limit")
    if arguments.system is not None:
        check_text("--system", arguments.system)
    with contextlib.ExitStack() as until_end:
        if arguments.url is not None:
            from dsv3_jax.client.chat import ChatServer

            check_url(arguments.url)
            if new_tokens is not None:
                sampling["max_tokens"] = new_tokens
            key = read_api_key(arguments.api_key_file)
            model = ChatServer(arguments.url, arguments.model, key, sampling)
        else:
            if arguments.api_key_file is not None:
                raise ValueError("--api-key-file: expected --url with it, got none")
            from dsv3_jax.cli.local_chat import LocalChat

            check_weights(arguments)
            model = until_end.enter_context(LocalChat(arguments, sampling))
        Conversation(model, arguments.system).run()
