"""Random training with random changes of ``.grad``, compared with one process."""

import pytest

from random_training import differences, train


@pytest.mark.parametrize(("world", "seeds"), [("two_ranks", range(4)), ("three_ranks", range(12, 14))], ids=["2", "3"])
def test_random_training(request, world, seeds):
    problems, results = zip(*request.getfixturevalue(world).run(train, seeds, timeout=150), strict=True)
    assert [text for texts in problems for text in texts] == []
    assert differences(results) == []


def test_random_training_of_a_rank_by_itself(two_ranks):
    for problems, results in two_ranks.run(train, range(20, 22), 6, True, timeout=150):
        assert problems == []
        assert results
