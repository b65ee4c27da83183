from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontier_llm.errors import FrontierError
from frontier_llm.run import hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n0", ["n0"]),
        ("n[0-2]", ["n0", "n1", "n2"]),
        ("frontier[00009-00011,00020]", ["frontier00009", "frontier00010", "frontier00011", "frontier00020"]),
        ("a1,n[0-1]x[2-3],login", ["a1", "n0x2", "n0x3", "n1x2", "n1x3", "login"]),
        ("nid[001000-001001]-ib", ["nid001000-ib", "nid001001-ib"]),
        ("", []),
        (" n1 , n2 ", ["n1", "n2"]),
    ],
)
def test_expand(text: str, hosts: list[str]) -> None:
    assert list(hostlist.expand(text)) == hosts


@pytest.mark.parametrize("text", ["n[0-", "n0]", "n[[0]]", "n[a-b]", "n[3-1]", "n[1-999999999]", "n[0-999]x[0-999]"])
def test_bad_lists_are_refused(text: str) -> None:
    with pytest.raises(FrontierError):
        hostlist.expand(text)


def test_compress_writes_ranges() -> None:
    assert hostlist.compress(["n7", "n0", "n1", "n1", "login"]) == "login,n[0-1,7]"
    assert hostlist.compress(["frontier00099", "frontier00100"]) == "frontier[00099-00100]"
    assert hostlist.compress(["n9", "n10"]) == "n9,n10"
    assert hostlist.compress([]) == ""


@given(st.sets(st.tuples(st.sampled_from(["n", "frontier", "a-b"]), st.integers(0, 12000), st.sampled_from([0, 5]))))
def test_expand_inverts_compress(parts: set[tuple[str, int, int]]) -> None:
    hosts = {f"{prefix}{str(number).zfill(width)}" for prefix, number, width in parts}
    expanded = hostlist.expand(hostlist.compress(hosts))
    assert set(expanded) == hosts
    assert len(expanded) == len(hosts)
