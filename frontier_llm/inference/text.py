"""Completes text: encodes prompts, decodes tokens as they are generated, and ends at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from frontier_llm import log
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.inference.generate import check_prompts, stream
from frontier_llm.inference.model import InferenceModel
from frontier_llm.inference.sampling import Sampling

_UNFINISHED = "\ufffd"  # replacement for a character whose last bytes are not decoded yet


@dataclass(frozen=True)
class TextCompletion:
    """Text that follows a prompt."""

    prompt: str
    text: str
    finish_reason: str  # "stop": end of document or a stop string; "length": token limit reached or context full
    num_tokens: int


def complete(
    model: InferenceModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    stops: Sequence[str] = (),
    on_text: Callable[[int, str], object] = lambda row, piece: None,
    *,
    use_cache: bool = True,
    batch_size: int = 8,
) -> list[TextCompletion]:
    """Complete every prompt, `batch_size` at a time.

    `on_text` receives each new piece of a row's text, in complete characters. An empty prompt starts a new document.
    The result of a row does not depend on its batch, because each row has its own random draws. Collective over tp and
    pp, and every rank returns all completions. Raises ConfigError before the first token if a prompt does not fit.
    """
    rows = [_Row(tokenizer, stops, prompt) for prompt in prompts]
    sampling = replace(sampling, stop_tokens=(*sampling.stop_tokens, tokenizer.eod))
    ids = [tokenizer.encode(prompt) or [tokenizer.eod] for prompt in prompts]
    check_prompts(model.config, ids)
    room = model.config.sequence_length - max(map(len, ids))
    if room < sampling.max_new_tokens:
        log.info(
            f"the model's context of {model.config.sequence_length} tokens has space for only {room} of the "
            f"{sampling.max_new_tokens} new tokens"
        )
    for first in range(0, len(rows), batch_size):
        batch = range(first, min(first + batch_size, len(rows)))
        for tokens in stream(model, ids[batch.start : batch.stop], sampling, use_cache, first):
            for number, token in zip(batch, tokens, strict=True):
                if token is not None and not rows[number].stopped:
                    rows[number].add(token, token in sampling.stop_tokens)
                    rows[number].report(number, on_text)
            if all(rows[number].stopped for number in batch):
                break
        for number in batch:
            rows[number].report(number, on_text, last=True)
    return [TextCompletion(row.prompt, row.text, "stop" if row.stopped else "length", len(row.tokens)) for row in rows]


class _Row:
    """Text of one prompt so far, to which tokens are added."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], prompt: str) -> None:
        self.prompt = prompt
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        # The prompt is decoded too, because tokenizers that mark word starts drop the space before the first word.
        self._prefix = tokenizer.encode(prompt)
        self._prefix_text = tokenizer.decode(self._prefix)
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False
        self._told = 0

    def add(self, token: int, is_last: bool) -> None:
        """Add one token, or end the row."""
        if is_last:
            self.stopped = True
            return
        self.tokens.append(token)
        self.text = self._tokenizer.decode([*self._prefix, *self.tokens])[len(self._prefix_text) :]
        ends = [self.text.find(stop) for stop in self._stops if stop in self.text]
        if ends:
            self.text = self.text[: min(ends)]
            self.stopped = True

    def report(self, number: int, on_text: Callable[[int, str], object], last: bool = False) -> None:
        """Report new text, except an incomplete character or the possible start of a stop string."""
        end = len(self.text) if last or self.stopped else len(self.text) - self._held_back()
        if end > self._told:
            on_text(number, self.text[self._told : end])
            self._told = end

    def _held_back(self) -> int:
        held = len(self.text) - len(self.text.rstrip(_UNFINISHED))
        for stop in self._stops:
            for size in range(held + 1, len(stop)):
                if self.text.endswith(stop[:size]):
                    held = size
        return held
