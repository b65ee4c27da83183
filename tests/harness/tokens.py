"""Counts the tokens (names, operators, literals) of Python source, without comments, docstrings and line breaks."""

from __future__ import annotations

import io
import tokenize

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_tokens(source: str) -> int:
    """Return the number of tokens of code. A string that is a separate statement is a docstring and does not count."""
    count = 0
    begins_statement = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            is_docstring = begins_statement and token.type == tokenize.STRING
            count += not is_docstring
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins_statement = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    return count
