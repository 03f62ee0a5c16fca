"""The HTTP server: the APIs of OpenAI and Anthropic in front of an engine.

In the order a request moves through it:

================= ======================================================================
app.py            the application: middleware, endpoints, start and end
access_log.py     one line of JSON for every request, without its text
api_keys.py       who may send requests
header_limit.py   size and time limits of request headers
body_limit.py     size and time limits of request bodies
openai/           the endpoints, and the types of their bodies
anthropic/        the same for /v1/messages
conversation.py   what the endpoints for conversations translate their bodies to
service.py        the engine as endpoints see it: encoding, submission, readiness
admission.py      how many requests may be open
grammar.py        structured output: what an answer's text has to match
tool_grammar.py   grammars of tool calls that have to come
dsml_grammar.py   the same for DeepSeek-V3.2's format
schema_limits.py  size and nesting of JSON schemas
job.py            one HTTP request's completions in the engine
sse.py            streams of events, and clients that go away
unread_answers.py answers that their clients do not read
parsers/          parts of an answer: reasoning, content, tool calls
errors.py         errors in the shapes of both APIs
health.py         /health, /ready, /version
watchdog.py       ends the process when the engine failed or is stuck
metrics.py        /metrics, with the names of vLLM
prefill.py        /prefill: pages of prompts for decode servers
remote_metrics.py the figures of both roles
page/             the page at /
settings.py       limits and names
run.py            the process: uvicorn, signals, draining
frontend/         HTTP in another process than the engine, as in ``dsv3 serve``
================= ======================================================================

The event loop does HTTP alone. Tokenization, chat templates and the compilation of grammars run in
threads of the server's own, and the engine's steps in that of the engine.
"""
