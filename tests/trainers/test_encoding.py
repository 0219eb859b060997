"""Values and errors survive the way to another process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster_roles import PickyError
from hypothesis import given, settings
from hypothesis import strategies as st
from requiring import require

from agentkit.errors import EngineError, RoleError


@pytest.fixture(scope="module")
def encoding() -> Any:
    require("ray", "pip install 'agentkit-rl[ray]'")
    from agentkit.trainers.cluster import encoding

    return encoding


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["float64", "float32", "int32", "bool", "int64"]),
    st.integers(0, 300) | st.integers(-40, 40).map(lambda offset: 32 * 1024 + offset),
)
def test_arrays_arrive_equal_aligned_and_writable(encoding: Any, dtype: str, size: int) -> None:
    array = np.random.default_rng(1).integers(0, 2, size).astype(dtype)
    encoded = encoding.encode({"x": array, "y": [array, array[::2]], "z": b"odd"})
    received = encoding.decode(encoded)
    for one, sent in zip((received["x"], *received["y"]), (array, array, array[::2]), strict=True):
        np.testing.assert_array_equal(one, sent)
        assert one.dtype == sent.dtype
        assert one.flags.aligned
        assert one.flags.writeable
    assert encoding.size(encoded) >= array.nbytes


def test_large_arrays_are_not_copied_when_they_are_encoded(encoding: Any) -> None:
    array = np.zeros(encoding.OUT_OF_BAND, np.uint8)
    _, buffers, _ = encoding.encode(array)
    assert any(np.shares_memory(np.asarray(memoryview(buffer)), array) for buffer in buffers)


def test_what_cannot_be_pickled_fails_before_it_is_sent(encoding: Any) -> None:
    with pytest.raises(Exception, match=r"lambda|local"):
        encoding.encode(lambda: None)


def _raised(encoding: Any, error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return encoding.decode_error(encoding.encode_error(caught, "the role (pid 1)"))


def test_errors_of_the_package_keep_type_attributes_and_the_remote_traceback(encoding: Any) -> None:
    error = _raised(encoding, PickyError(code=3))
    assert isinstance(error, PickyError)
    assert (error.code, str(error)) == (3, "code 3")
    assert "_raised" in str(error.__cause__)


def test_an_error_that_does_not_pickle_keeps_type_and_text(encoding: Any) -> None:
    original = EngineError("full")
    original.callback = lambda: None  # type: ignore[attr-defined]
    error = _raised(encoding, original)
    assert type(error) is EngineError
    assert str(error) == "full"


def test_other_errors_become_role_errors_with_type_and_traceback(encoding: Any) -> None:
    error = _raised(encoding, ValueError("what"))
    assert type(error) is RoleError
    assert "the role (pid 1) raised ValueError: what" in str(error)
    assert "Traceback" in str(error)
