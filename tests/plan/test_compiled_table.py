"""The planner's bytes against the compilers', for whole models: committed results and their
page."""

from pathlib import Path

import pytest

from scripts import plan_compiled

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/plan_compiled.json"

pytestmark = pytest.mark.slow  # makes the shapes of whole models


@pytest.fixture(scope="module")
def compared():
    return plan_compiled.compared_rows(RESULTS)


def test_the_formula_is_within_5_percent(compared):
    ratios = {each.case.name: each.formula / each.compiler for each in compared if each.compiler}
    assert len(ratios) >= 12
    assert all(0.95 < ratio < 1.05 for ratio in ratios.values()), ratios


def test_both_refuse_the_same(compared):
    assert {each.formula_fits for each in compared} == {True, False}
    assert [each.formula_fits for each in compared] == [each.compiler_fits for each in compared]


def test_every_program_has_the_kernels(compared):
    """Each program has at least one attention kernel per layer."""
    for each in compared:
        if each.compiler:
            assert each.kernels >= each.case.deployment.config.num_hidden_layers


def test_steps_of_an_engine_do_not_copy_the_cache(compared):
    """The results overwrite the cache, and a copy of it would not be in the formula."""
    steps = [each for each in compared if each.case.serve]
    assert len(steps) >= 6
    for each in steps:
        assert each.reused >= each.cache > 0.25 * each.compiler
        assert each.compiler < each.formula + 0.1 * each.cache


def test_the_page_shows_the_record(compared):
    text = (ROOT / "docs/planning.md").read_text("utf-8")
    shown = text.partition(plan_compiled.BEGIN)[2].partition(plan_compiled.END)[0].strip()
    assert shown == plan_compiled.table(compared)
