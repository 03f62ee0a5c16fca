"""A tier on disk returns no wrong page.

``python -m scripts.bench_tiers`` does the same for longer.
"""

from __future__ import annotations

import pytest

from benchmarks.serving import page_damage


def test_flipped_bits(tmp_path):
    done = page_damage.flip_bits(tmp_path, flips=8)
    assert done["refused"] == 8
    assert done["right"] > 8


@pytest.mark.slow
def test_killed_writers(tmp_path):
    assert page_damage.kill_writers(tmp_path, rounds=3)["right"] > 20


@pytest.mark.slow
def test_two_processes(tmp_path):
    done = page_damage.two_processes(tmp_path, seconds=1.5)
    assert done["right"] > 20
    assert done["refused"] == 0


def test_a_wrong_page_is_noticed(tmp_path, monkeypatch):
    with page_damage.opened(tmp_path, 2**30) as disk:
        wanted = page_damage.addresses(0)
        disk.store([page_damage.record_of(address) for address in wanted])
        assert disk.flush(60)
        other = page_damage.record_of(wanted[1])
        monkeypatch.setattr(page_damage, "record_of", lambda address: other)
        with pytest.raises(page_damage.WrongPageError):
            page_damage.read(disk, wanted)
