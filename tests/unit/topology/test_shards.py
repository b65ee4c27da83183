"""A ShardSpec describes the rectangular part of a parameter on one rank. The rectangles of all ranks cover the
parameter once.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.blueprint.parameters import (
    How,
    Parameter,
    ParameterKind,
    Split,
)
from frontier_llm.topology.shards import shard


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.integers(1, 5),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.data(),
)
def test_shards_cover_every_element_once(
    degrees: tuple[int, int],
    part: int,
    dims: tuple[int, int],
    data: st.DataObject,
) -> None:
    """The shards are split along one axis or two, in different dims or in the same dim."""
    shape = [data.draw(st.integers(1, 4)) for _ in range(3)]
    for dim in dims:
        shape[dim] = degrees[0] * degrees[1] * part
    parameter = Parameter("w", tuple(shape), ParameterKind.MATRIX, {"tp": Split(dims[0]), "ep": Split(dims[1])}, 0.02)
    seen = np.zeros(shape, dtype=int)
    for place in product(*map(range, degrees)):
        spec = shard(
            parameter,
            dict(zip(("tp", "ep"), degrees, strict=True)),
            dict(zip(("tp", "ep"), place, strict=True)),
        )
        assert spec.counted and spec.numel == seen.size // (degrees[0] * degrees[1])
        seen[tuple(slice(start, start + size) for start, size in zip(spec.offset, spec.shape, strict=True))] += 1
    assert (seen == 1).all()


def test_an_uneven_split_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="w: 6 is not divisible by tp 4"):
        shard(Parameter("w", (6, 2), ParameterKind.MATRIX, {"tp": Split(0)}), {"tp": 4})


def test_of_copies_the_first_on_every_axis_counts() -> None:
    norm = Parameter("n", (8,), ParameterKind.VECTOR, {"tp": How.PARTIAL}, init_value=1.0)
    specs = [shard(norm, {"tp": 4}, {"tp": rank}) for rank in range(4)]
    assert [spec.counted for spec in specs] == [True, False, False, False]
    assert all(spec.parameter.partial_axes() == ("tp",) and spec.shape == spec.global_shape == (8,) for spec in specs)
    assert not specs[1].splits_over("tp")
    tied = Parameter("e", (8, 2), ParameterKind.EMBEDDING, {"tp": Split(0), "tied": How.PARTIAL})
    copies = [shard(tied, {"tp": 2}, {"tp": 1, "tied": rank}) for rank in range(2)]
    assert (
        [spec.counted for spec in copies] == [True, False]
        and copies[1].parameter.partial_axes() == ("tied",)
        and copies[1].splits_over("tp")
    )
