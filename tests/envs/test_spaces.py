"""The text space contains all Unicode strings and nothing else."""

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkit.envs.spaces import Text


@given(st.text())
def test_any_unicode_text_is_in_the_space(text):
    assert text in Text()
    assert (text in Text(max_length=3)) == (len(text) <= 3)


@pytest.mark.parametrize("other", [None, 3, b"bytes", ["a"], "\ud800", "a\udfffb"])
def test_values_that_are_not_text_are_not_in_the_space(other):
    assert other not in Text()


@given(st.integers(0, 2**32), st.integers(0, 50))
def test_samples_are_members_and_follow_the_seed(seed, max_length):
    space, twin = Text(max_length, seed=seed), Text(max_length, seed=seed)
    drawn = [space.sample() for _ in range(5)]
    assert all(sample in space for sample in drawn)
    assert drawn == [twin.sample() for _ in range(5)]


def test_examples_are_sampled_but_do_not_restrict():
    space = Text(examples=("Left", "Right"), seed=0)
    assert {space.sample() for _ in range(50)} == {"Left", "Right"}
    assert "Up" in space


def test_it_is_a_gymnasium_space_with_an_equality():
    assert isinstance(Text(), gymnasium.Space)
    assert Text(5) == Text(5) != Text(6)
    assert hash(Text(5)) == hash(Text(5))
    with pytest.raises(ValueError, match="negative"):
        Text(-1)
    with pytest.raises(ValueError, match="neither mask nor probability"):
        Text().sample(mask=(1, None))
