"""``--share``: the parts of the suite that CI runs."""

import pytest

from tests.support.shares import _share, files_of_share

FILES = [f"tests/test_{name}.py" for name in "cabfed"]


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_every_file_is_in_one_share(count):
    shares = [files_of_share(FILES, number, count) for number in range(1, count + 1)]
    assert sorted(file for share in shares for file in share) == sorted(FILES)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_neighbouring_files_are_in_different_shares():
    assert files_of_share(FILES, 2, 2) == {f"tests/test_{name}.py" for name in "bdf"}


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/2", "1/", "-1/2"])
def test_a_share_that_does_not_exist(text):
    with pytest.raises(pytest.UsageError, match=f"expected K/N with 1 <= K <= N, got {text}"):
        _share(text)
