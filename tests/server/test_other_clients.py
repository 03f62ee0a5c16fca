"""Clients of other projects, unmodified: litellm and lm_eval.

Each runs in a process of its own, because they change global state when they are imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "dsv3_jax" / "demo"

pytestmark = pytest.mark.slow


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed: pip install '.[clients]'"
    return pytest.mark.skipif(bool(missing), reason=reason)


def run(code: str, *arguments: str) -> Any:
    """Runs a program without access to other hosts. Returns the JSON in its last line."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **offline, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


LITELLM = """
import json, sys
import litellm
options = {"api_base": sys.argv[1] + "/v1", "api_key": "none", "temperature": 0, "max_tokens": 12}
messages = [{"role": "user", "content": "def f(x):"}]
answers = []
for provider in ("openai", "hosted_vllm"):
    model = f"{provider}/demo"
    whole = litellm.completion(model, messages, **options)
    parts = list(litellm.completion(model, messages, stream=True, **options))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    answers.append([whole.choices[0].message.content, text, whole.usage.completion_tokens])
model = "text-completion-openai/demo"
completion = litellm.text_completion(model=model, prompt="def f(", **options)
answers.append(completion.choices[0].text)
try:
    litellm.completion("openai/demo", messages, **{**options, "max_tokens": 10**6})
except litellm.BadRequestError as error:
    answers.append(str(error))
print(json.dumps(answers))
"""


@needs("litellm")
def test_litellm(server):
    first, second, text, refused = run(LITELLM, server.url)
    body = {"model": "demo", "temperature": 0, "max_tokens": 12}
    message = [{"role": "user", "content": "def f(x):"}]
    expected = server.post("/v1/chat/completions", body | {"messages": message})
    content = expected["choices"][0]["message"]["content"]
    assert first == second == [content, content, expected["usage"]["completion_tokens"]]
    completion = server.post("/v1/completions", body | {"prompt": "def f("})
    assert text == completion["choices"][0]["text"]
    assert "max_tokens: expected at most" in refused


LM_EVAL = """
import json, sys
import lm_eval
url, tokenizer, documents = sys.argv[1:]
task = {
    "task": "code_choice",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": documents}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
result = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "model": "demo", "base_url": url + "/v1/completions", "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface", "tokenized_requests": True, "max_length": 256,
    },
    tasks=[task], log_samples=True, bootstrap_iters=0,
)
samples = sorted(result["samples"]["code_choice"], key=lambda sample: sample["doc_id"])
print(json.dumps({
    "acc": result["results"]["code_choice"]["acc,none"],
    "loglikelihoods": [[response[0][0] for response in s["resps"]] for s in samples],
}))
"""

DOCUMENTS = [
    {"text": "def add(a, b):\n    return a", "choices": [" + b", " import", " ] ]"], "answer": 0},
    {"text": "for i in", "choices": [" class", " range(10):", " return"], "answer": 1},
    {
        "text": "class Stack:\n    def __init__(",
        "choices": ["self):", "0x):", "while"],
        "answer": 0,
    },
    {"text": "import os\nimport", "choices": [" sys", " + 1", " ):"], "answer": 2},
]


@needs("lm_eval", "datasets", "transformers")
def test_lm_eval(server, tmp_path):
    """Scores are those of the engine in Python, to the last digit."""
    file = tmp_path / "documents.json"
    file.write_text("\n".join(map(json.dumps, DOCUMENTS)), "utf-8")
    result = run(LM_EVAL, server.url, str(DEMO), str(file))
    server.wait_until_idle()
    expected = []
    for document in DOCUMENTS:
        scores = []
        for choice in document["choices"]:
            # lm_eval sends no token for the beginning of a text.
            texts = (document["text"], document["text"] + choice)
            prompt, tokens = (server.tokenizer.encode(t, add_special_tokens=False) for t in texts)
            assert tokens[: len(prompt)] == prompt
            request = server.engine.submit(
                tokens, max_new_tokens=1, prompt_logprobs=1, temperature=0.0
            )
            scores.append(sum(request.result(60).prompt_logprobs[len(prompt) :]))
        expected.append(scores)
    assert result["loglikelihoods"] == expected
    hits = [
        max(range(3), key=s.__getitem__) == d["answer"]
        for s, d in zip(expected, DOCUMENTS, strict=True)
    ]
    assert result["acc"] == sum(hits) / len(hits)
    assert 0 < result["acc"] < 1
