"""A model class for lm-evaluation-harness: `lm_eval run --model frontier-llm --model_args path=runs/mine --tasks …`.

Releases of lm_eval after 0.4.13 find the class by the entry point `lm_eval.models` that this package declares. Releases
up to 0.4.13 accept only the models in lm_eval's own table. For these, the command `frontier-lm-eval` (`cli/lm_eval.py`)
runs lm_eval's command line, with all its options and models, in a process that has registered this class.

Arguments: path (run directory, checkpoint or Hugging Face directory), tokenizer, dtype, device, batch_size, plugin. In
Python: `lm_eval.simple_evaluate(model=FrontierLM(path), …)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from frontier_llm import log
from frontier_llm.comm import serial_mesh
from frontier_llm.config import OpsConfig
from frontier_llm.errors import ConfigError
from frontier_llm.inference.model import build_inference_model, inference_plan
from frontier_llm.inference.open import open_model, open_tokenizer
from frontier_llm.inference.sampling import Sampling
from frontier_llm.inference.score import score
from frontier_llm.inference.text import complete

DEFAULT_NEW_TOKENS = 256  # lm_eval's default
FILTERS = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")  # arguments with the names of `Sampling`
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("frontier-llm")
class FrontierLM(TemplateLM):
    """Model on one device in one process.

    `frontier-llm evaluate` runs larger models with tensor, pipeline and data parallelism.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str | None = None,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str = 8,
        plugin: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        opened = open_model(path, verified=True, plugins=[plugin] if plugin else [])
        self.tokens = open_tokenizer(opened, tokenizer)
        self.batch_size_per_gpu = int(batch_size) if str(batch_size).isdigit() else 8
        place = _device(device)
        plan = inference_plan(opened.source.model, 1, 1, 1)
        self.model = build_inference_model(
            source=opened.source,
            plan=plan,
            mesh=serial_mesh(),
            device=place,
            dtype=dtype or opened.dtype,
            ops=OpsConfig(),
        )

    @property
    def eot_token_id(self) -> int:
        """Token that ends a document. It also replaces an empty context."""
        return self.tokens.eod

    @property
    def max_length(self) -> int:
        """Context length in tokens."""
        return self.model.config.sequence_length

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in lm_eval's caches."""
        return self.tokens.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, never with special ids at its ends."""
        return self.tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (sum of log-probabilities, greedy) for each (texts, context ids, continuation ids)."""
        scores = score(
            self.model,
            [(context, continuation) for _, context, continuation in requests],
            self.batch_size_per_gpu,
        )
        return [(entry.log_probability, entry.greedy) for entry in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each complete text, with each token predicted once."""
        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            pairs = [make_disjoint_window(window) for window in windows]
            totals.append(sum(entry.log_probability for entry in score(self.model, pairs, self.batch_size_per_gpu)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated text, up to a stop string, for each (context, generation arguments).

        Requests with equal arguments are continued in batches. Raises ConfigError if the new tokens leave no space for
        the context.
        """
        known = {"until", "do_sample", "temperature", *FILTERS, *LENGTHS}
        if unknown := {key for request in requests for key in request.args[1]} - known:
            log.warn(f"generation arguments that have no effect: {', '.join(sorted(unknown))}")
        asked = [_generation(request.args[1]) for request in requests]
        most = max((sampling.max_new_tokens for sampling, _ in asked), default=0)
        if most >= self.max_length:
            raise ConfigError(
                f"{most} new tokens leave no space for the prompt in the model's context of {self.max_length} tokens",
                where="max_gen_toks",
                fix=f"for example --gen_kwargs max_gen_toks={self.max_length // 2}",
            )
        texts = [""] * len(requests)
        for how in dict.fromkeys(asked):
            sampling, stops = how
            numbers = [number for number, other in enumerate(asked) if other == how]
            prompts = [self._fitting(requests[number].args[0], sampling.max_new_tokens) for number in numbers]
            completions = complete(
                model=self.model,
                tokenizer=self.tokens,
                prompts=prompts,
                sampling=sampling,
                stops=stops,
                batch_size=self.batch_size_per_gpu,
            )
            for number, completion in zip(numbers, completions, strict=True):
                texts[number] = completion.text
        return texts

    def _fitting(self, context: str, new_tokens: int) -> str:
        """Return the end of a context, cut so that the new tokens still fit into the model's context length."""
        room = self.max_length - new_tokens
        ids = self.tok_encode(context)
        return context if len(ids) <= room else self.tokens.decode(ids[-room:])


def _generation(options: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
    """Return the sampling and the stop strings from lm_eval's generation arguments."""
    normal: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), DEFAULT_NEW_TOKENS))
    filters = {name: normal[name] for name in FILTERS if normal.get(name) is not None}
    temperature = float(normal.get("temperature", 1.0)) if normal["do_sample"] else 0.0
    sampling = Sampling(
        max_new_tokens=normal["max_gen_toks"],
        temperature=temperature,
        **filters,
    )
    return sampling, tuple(normal["until"])


def _device(wanted: str | None) -> torch.device:
    """Return the device, which is the CPU if there is no GPU.

    lm_eval's command line passes cuda:0 if its user names no device, so cuda:0 without a GPU must not be an error.
    """
    if torch.cuda.is_available():
        return torch.device(wanted or "cuda")
    if wanted not in (None, "cpu"):
        log.info(f"torch sees no GPU: the model runs on the CPU, not on {wanted}")
    return torch.device("cpu")
