"""The progress that a call reports while it runs."""

from dsv3_jax.offline import pace as offline_pace
from tests.generation.fragments import letters

PROMPTS = [letters(text) for text in ("one", "another", "a third", "four", "five")]


def test_tokens_of_all_prompts_so_far(generator, monkeypatch):
    """The numbers rise, also when the fifth prompt takes a slot, and the last is the total."""
    monkeypatch.setattr(offline_pace, "DISPATCH_SECONDS", 0.0)  # one step per dispatch
    seen: list[int] = []
    settings = {"max_new_tokens": [3, 5, 4, 2, 3], "ignore_eos": True}
    plain = generator.generate(PROMPTS, **settings)
    out = generator.generate(PROMPTS, **settings, progress=seen.append)
    assert [each.tokens for each in out] == [each.tokens for each in plain]
    assert seen == sorted(seen)
    assert seen[-1] == out.stats.new_tokens == 17
    assert seen == [2, 4, 8, 9, 13, 16, 17]
