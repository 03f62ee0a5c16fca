"""The timeline of an engine: its samples, and the picture of them."""

import dataclasses

import numpy as np
import pytest

from dsv3_jax.engine.loop import EngineLoop
from dsv3_jax.engine.stats import Timeline
from dsv3_jax.viz.canvas import save
from dsv3_jax.viz.serving import timeline
from tests.engine.simulated_engine import SimulatedEngine

COLUMNS = {
    "seconds": [0.0, 1.0, 2.0, 3.0, 4.0],
    "running": [0, 2, 2, 1, 0],
    "waiting": [3, 1, 0, 0, 0],
    "cache_usage": [0.0, 0.5, 1.0, 0.5, 0.0],
    "steps": [0, 2, 2, 6, 6],
    "prompt_tokens": [0, 40, 40, 48, 48],
    "output_tokens": [0, 4, 4, 24, 24],
    "preemptions": [0, 0, 2, 2, 3],
}


def test_a_timeline_shows_its_samples():
    requests, tokens, cache = timeline(COLUMNS, "title").axes
    heights = [np.unique(area.get_paths()[0].vertices[:, 1]) for area in requests.collections]
    np.testing.assert_allclose(heights[0], [0, 1, 2])  # running
    np.testing.assert_allclose(heights[1].max(), 3)  # waiting, above them
    # No step ended between 1 and 2 s, so that the second interval is from 1 to 3 s.
    generated, prompt = (patch.get_data() for patch in tokens.patches)
    np.testing.assert_allclose(generated.edges, [0, 1, 3, 4])
    np.testing.assert_allclose(generated.values, [2, 5, 0])
    np.testing.assert_allclose(prompt.values - generated.values, [20, 2, 0])
    (marks,) = cache.lines
    assert marks.get_xdata().tolist() == [2.0, 4.0]
    assert "preemptions (3)" in [text.get_text() for text in cache.get_legend().get_texts()]


def test_a_timeline_without_preemptions_has_no_marks():
    assert not timeline(COLUMNS | {"preemptions": [0] * 5}).axes[2].lines


def test_many_samples_are_averaged():
    count = 3000
    columns = {name: np.arange(count) for name in COLUMNS}
    tokens = timeline(columns).axes[1].patches[0].get_data()
    assert len(tokens.values) <= 240
    np.testing.assert_allclose(tokens.values, 1)


def test_one_sample_is_refused():
    with pytest.raises(ValueError, match="columns: expected at least two samples, got 1"):
        timeline({name: values[:1] for name, values in COLUMNS.items()})


def test_samples_begin_at_zero(tmp_path):
    engine = SimulatedEngine(num_pages=20)
    loop: EngineLoop = engine.loop

    def serve(samples: Timeline) -> None:
        for i in range(5):
            engine.submit([i, 2, 3, 4, 5], 9)
        samples.sample(loop.stats())
        while loop.step():
            samples.sample(loop.stats())

    serve(Timeline())
    samples = Timeline()
    serve(samples)
    first = {name: values[0] for name, values in samples.columns.items()}
    assert first == dict.fromkeys(samples.columns, 0) | {"waiting": 5}
    last = {name: values[-1] for name, values in samples.columns.items()}
    assert (last["running"], last["waiting"], last["prompt_tokens"]) == (0, 0, 5)
    assert last["prefix_hit_tokens"] == 20
    assert 0 < last["output_tokens"] <= 45
    assert set(first) - {"prefix_hit_tokens"} == set(COLUMNS)
    save(timeline(samples.columns), tmp_path / "timeline.png")
    assert dataclasses.is_dataclass(loop.stats())
