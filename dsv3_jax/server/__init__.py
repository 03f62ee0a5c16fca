"""The HTTP server: the APIs of OpenAI and Anthropic in front of an engine.

In the order a request moves through it:

==================== =========================================================================
app.py               the application: middleware, endpoints, start and end; probes
access_log.py        one line of JSON for every request, without its text
connection_limits.py limits of request headers, and of answers that clients do not read
middleware.py        API keys; size and time limits of request bodies
openai/              the endpoints, and the types of their bodies
anthropic/           the same for /v1/messages
conversation.py      what the endpoints for conversations translate their bodies to
service.py           the engine as endpoints see it: settings, admission, submission, readiness
grammar.py           structured output: what an answer's text has to match
tool_grammar.py      grammars of tool calls that have to come
job.py               one HTTP request's completions in the engine
sse.py               streams of events, and clients that go away
parsers/             parts of an answer: reasoning, content, tool calls
errors.py            errors in the shapes of both APIs
metrics.py           /metrics, with the names of vLLM
prefill.py           /prefill: pages of prompts for decode servers
page/                the page at /
run.py               the process: uvicorn, signals, draining, a watchdog of the engine
frontend/            HTTP in another process than the engine, as in ``dsv3 serve``
==================== =========================================================================

The event loop does HTTP alone. Tokenization, chat templates and the compilation of grammars run in
threads of the server's own, and the engine's steps in that of the engine.
"""
