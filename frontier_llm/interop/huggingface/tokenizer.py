"""Writes a tokenizer's files for transformers, which then gives the same ids for the same text."""

from __future__ import annotations

from pathlib import Path

from frontier_llm.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from frontier_llm.errors import DataError
from frontier_llm.units import strict_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_ALONG = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
END_OF_DOCUMENT = "<|endoftext|>"


def tokenizer_files(tokenizer: Tokenizer, sequence_length: int) -> dict[str, str | Path]:
    """Return file name → content or path of the file to copy. Raises DataError if the kind has no counterpart."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _huggingface(tokenizer, sequence_length)
    if isinstance(tokenizer, SentencePieceTokenizer):
        content, eos = _sentencepiece(tokenizer.path)
        config = tokenizer_config(eos, sequence_length)
        return {TOKENIZER: content, TOKENIZER_CONFIG: config, "tokenizer.model": tokenizer.path}
    if isinstance(tokenizer, ByteTokenizer):
        return {TOKENIZER: _bytes(), TOKENIZER_CONFIG: tokenizer_config(END_OF_DOCUMENT, sequence_length)}
    raise DataError(
        f"a tokenizer of the type {type(tokenizer).__name__} cannot be written for transformers", where=tokenizer.name
    )


def tokenizer_config(eos_token: str, sequence_length: int) -> str:
    """Return the tokenizer_config.json of a tokenizer that adds no tokens to a text."""
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "bos_token": eos_token,
        "pad_token": eos_token,
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }
    return strict_json(content, indent=2) + "\n"


def _huggingface(tokenizer: HuggingFaceTokenizer, sequence_length: int) -> dict[str, str | Path]:
    path = tokenizer.path
    files: dict[str, str | Path] = {name: path.with_name(name) for name in _ALONG if path.with_name(name).is_file()}
    for name in files:
        real = path.with_name(name).resolve()
        home = path.parent.resolve()
        # In a cache of the hub, files are links into the folder blobs/ of the same cache entry.
        if not real.is_relative_to(home) and not real.is_relative_to(home.parent.parent / "blobs"):
            what = f"is a link to {real}, outside of its directory; that file would be published with the model"
            raise DataError(what, where=str(path.with_name(name)), fix="copy the file there, or remove the link")
    files.setdefault(TOKENIZER_CONFIG, tokenizer_config(tokenizer.eod_name, sequence_length))
    return {TOKENIZER: tokenizer.as_file, **files}


def _bytes() -> str:
    """Return the tokenizer.json of the byte tokenizer: a byte's id is its value, and 256 ends a document."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    # A letter with a code point below 256 stands for the byte of this value. The other letters, in order, stand for the
    # bytes without such a letter.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(letter): letter for letter in letters if ord(letter) < 256}
    others = iter(letters[len(own) :])
    vocabulary = {own.get(byte) or next(others): byte for byte in range(256)}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return str(model.to_str(pretty=True))


def _sentencepiece(path: Path) -> tuple[str, str]:
    """Return (tokenizer.json, the end-of-document piece) of a byte-pair sentencepiece model.

    The model must have byte fallback and no normalisation. Both libraries merge the neighbouring pair with the best
    score first, the leftmost of equal pairs. Every split of a piece into two pieces therefore becomes a merge, ranked
    by the score of the merged piece.
    """
    import sentencepiece
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers

    source = sentencepiece.SentencePieceProcessor(model_file=str(path))
    pieces = [source.id_to_piece(number) for number in range(source.vocab_size())]
    ids = {piece: number for number, piece in enumerate(pieces)}
    if source.unk_id() < 0 or not source.is_byte(ids.get("<0x0A>", source.unk_id())):
        raise DataError(
            "has no byte pieces, which transformers needs to encode every text",
            where=str(path),
            fix="use a sentencepiece model that was trained with byte_fallback",
        )
    # user-defined symbols (the newline) have score 0, as control pieces do; they are matched before any merge
    special = [n for n in range(len(pieces)) if source.is_control(n) or source.is_unknown(n)]
    scored = [n for n in range(len(pieces)) if n not in special and not source.is_byte(n)]
    symbols = [n for n in scored if source.get_score(n) == 0 and pieces[n] == "\n"]
    plain = set(scored) - set(symbols)
    plain_pieces = {pieces[n] for n in plain}
    merges = sorted(
        (-source.get_score(n), ids[pieces[n][:cut]], ids[pieces[n][cut:]])
        for n in plain
        for cut in range(1, len(pieces[n]))
        if pieces[n][:cut] in plain_pieces and pieces[n][cut:] in plain_pieces
    )
    pairs = [(pieces[left], pieces[right]) for _, left, right in merges]
    bpe = models.BPE(vocab=ids, merges=pairs, unk_token=pieces[source.unk_id()], byte_fallback=True, fuse_unk=False)
    result = tokenizers.Tokenizer(bpe)
    result.normalizer = normalizers.Replace(" ", "\u2581")
    result.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    result.add_special_tokens([AddedToken(pieces[n], special=True, normalized=False) for n in special])
    result.add_tokens([AddedToken(pieces[n], special=False, normalized=False) for n in symbols])
    return str(result.to_str(pretty=True)), str(pieces[source.eos_id()])
