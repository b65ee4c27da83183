"""Student's t: how much wider a 95 % interval is that rests on few values."""

from __future__ import annotations

# two-sided 95 % quantiles for 1, 2, 3 … degrees of freedom; the square is the 95 % point of F(1, dof)
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
_NORMAL = 1.96  # for ever more of them


def t95(degrees_of_freedom: int) -> float:
    """Half width of a two-sided 95 % interval in standard errors."""
    return _T95[degrees_of_freedom - 1] if degrees_of_freedom <= len(_T95) else _NORMAL
