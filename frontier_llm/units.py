"""Units and their text forms. Every quantity in the package has its unit in its name (`_bytes`, `_s`, `_flops`)."""

import math
import os
import re
from typing import Any

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TERA = 1e12


def format_bytes(size_bytes: float) -> str:
    """1536 -> '1.5 KiB'. Uses binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def format_count(number: float) -> str:
    """1_234_000 -> '1.23M'. For parameters and tokens."""
    for threshold, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= threshold:
            return f"{number / threshold:.3g}{suffix}"
    return f"{number:.3g}"


def format_seconds(seconds: float) -> str:
    """93784 -> '1d 02:03:04'. Durations below one minute keep three significant digits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest_s:02}"
    return f"{hours}:{minutes:02}:{rest_s:02}"


def format_days(days: float) -> str:
    """76.24 -> '76.2 days'. Less than one day is given as by `format_seconds`."""
    return format_seconds(days * 86_400) if days < 1 else f"{days:,.1f} days"


def format_hours(hours: float) -> str:
    """1661.66 -> '1,661.7', 0.01472 -> '0.015'. For hours and node-hours."""
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def plural(number: int, noun: str) -> str:
    """(1, 'microbatch') -> '1 microbatch', (4, 'microbatch') -> '4 microbatches'. Adds `-es` after s, x, ch and sh."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def format_age(seconds: float) -> str:
    """5400 -> '1 h ago'. Whole units, rounded down."""
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:.0f} {unit} ago"
    return "just now"


# All control characters except tab and newline. Unpaired surrogates cannot be printed, and direction marks change the
# order in which a terminal shows text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that a name from a foreign file cannot control the
    terminal.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def strict_json(content: Any, indent: int | None = 1, ensure_ascii: bool = True, sort_keys: bool = False) -> str:
    """Return JSON that every parser accepts: NaN and infinities become null, and paths become text.

    `indent=None` writes one line.
    """
    import json  # imported here, so that `--help` starts faster

    options: dict[str, Any] = {"indent": indent, "ensure_ascii": ensure_ascii, "sort_keys": sort_keys}
    return json.dumps(_without_nan(content), allow_nan=False, default=os.fspath, **options)


def _without_nan(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_nan(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_without_nan(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
