"""Values that travel between processes arrive as they were."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from requiring import require

from agentkit.trainers.inference.base import Generation, Sampling

DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?"),
    arrays.complex_number_dtypes(endianness="?"),
    arrays.unicode_string_dtypes(),
    arrays.datetime64_dtypes(endianness="<"),
    st.just(np.dtype([("a", np.int32), ("b", np.float64)])),
)
ARRAYS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0)))


@settings(deadline=None)
@given(array=ARRAYS, transposed=st.booleans(), large=st.booleans())
def test_arrays_keep_type_shape_and_bits_and_are_writable(array: np.ndarray, transposed: bool, large: bool) -> None:
    require("ray", "pip install 'agentkit-rl[ray]'")
    from agentkit.trainers.cluster.encoding import OUT_OF_BAND, decode, encode

    if large and array.size:  # not copied into the pickle
        array = np.broadcast_to(array, (OUT_OF_BAND, *array.shape)).copy()
    sent = array.T if transposed else array
    got = decode(encode({"value": [sent]}))["value"][0]
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.tobytes() == sent.tobytes()
    assert got.flags.writeable
    assert not np.shares_memory(got, sent)


def test_pickled_requests_and_answers_keep_every_field() -> None:
    sampling = Sampling(5, temperature=0.5, top_p=0.25, top_k=3, stop_ids=(1, 2), stop_strings=("a",), seed=7)
    defaults = Sampling(5)
    for field in dataclasses.fields(Sampling)[1:]:
        assert getattr(sampling, field.name) != getattr(defaults, field.name), "this test does not see a lost field"
    assert pickle.loads(pickle.dumps(sampling)) == sampling
    answer = Generation(np.arange(3, dtype=np.int32), np.ones(3, np.float32), ((1, 2), (2, 1)), "length")
    got = pickle.loads(pickle.dumps(answer))
    for field in dataclasses.fields(Generation):
        np.testing.assert_array_equal(getattr(got, field.name), getattr(answer, field.name))
