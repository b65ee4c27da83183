"""Trained models from Python: a checkpoint of any layout as a `torch.nn.Module` on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from frontier_llm.api.run import Run
from frontier_llm.config import ModelConfig, OpsConfig
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.errors import CheckpointError, ConfigError, DataError
from frontier_llm.inference.evaluate import encode_pair
from frontier_llm.inference.heldout import HeldOut, held_out
from frontier_llm.inference.model import InferenceModel, build_inference_model, inference_run
from frontier_llm.inference.open import OpenedModel, open_model, open_tokenizer
from frontier_llm.inference.sampling import Sampling
from frontier_llm.inference.score import Likelihood
from frontier_llm.inference.score import score as score_tokens
from frontier_llm.inference.text import complete
from frontier_llm.interop.huggingface.export import family_for
from frontier_llm.training.join import joined

Device = Literal["auto", "cpu", "cuda"]
Text = str | Sequence[int]  # text, or its tokens


class Model(torch.nn.Module):
    """A trained model on one device, as returned by `open_checkpoint`. The model computes without gradients."""

    def __init__(self, opened: OpenedModel, inference: InferenceModel) -> None:
        super().__init__()
        self.path = opened.path
        self.config: ModelConfig = inference.config
        self.stage = inference.stage
        self._opened = opened
        self._inference = inference
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with. Raises FrontierError if it is unknown, or not on this
        computer.
        """
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._opened, None)
        return self._tokenizer

    @torch.inference_mode()
    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits (B, S, V) of token ids (B, S), in fp32. S is at most the model's sequence length."""
        if tokens_BS.shape[1] > self.config.sequence_length:
            raise ConfigError(
                f"{tokens_BS.shape[1]} tokens are more than the model's sequence length {self.config.sequence_length}",
                "cut the text, or split it into windows",
                "tokens",
            )
        x_SBH = self._inference.hidden(tokens_BS.T.contiguous().to(self._inference.device))
        assert x_SBH is not None
        return self._inference.whole_logits(x_SBH).transpose(0, 1)

    def generate(self, prompts: str | Sequence[str], *, stops: str | Sequence[str] = (), **sampling: Any) -> Any:
        """Continue one prompt, or several at once. Returns the new text, or a list of texts.

        `sampling` has the fields of `inference.sampling.Sampling`: max_new_tokens, temperature, top_k, top_p, min_p,
        repetition_penalty, seed, stop_tokens. Raises FrontierError for invalid values and for too long prompts.
        """
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        ends = [stops] if isinstance(stops, str) else stops
        done = complete(self._inference, self.tokenizer, several, Sampling(**sampling), ends)
        return done[0].text if isinstance(prompts, str) else [one.text for one in done]

    def state_dict(self, *args: Any, names: Literal["module", "run", "huggingface"] = "module", **more: Any) -> Any:
        """Return the weights by name.

        `names="module"` is torch's own dictionary of this module. `"run"` has the names of checkpoints. `"huggingface"`
        has the names and shapes that transformers expects; FrontierError names the reason if no family of transformers
        computes this model.
        """
        if names == "module":
            return super().state_dict(*args, **more)
        if names == "run":
            parameters: Iterable[Any] = self.stage.parameters()
            return {parameter.spec.name: parameter.detach() for parameter in parameters}
        source = self._opened.source
        weights: dict[str, Tensor] = {}
        for rule in family_for(self.config).names.rules(self.config):
            shape = rule.parameter.shape
            try:
                ours = source.rectangle(rule.parameter.name, (0,) * len(shape), shape)
            except FileNotFoundError as error:
                raise CheckpointError(
                    "was deleted after it had been opened; the run keeps its newest checkpoints",
                    where=str(self.path),
                    fix="open the newest checkpoint",
                ) from error
            weights.update(zip(rule.theirs, rule.cut(ours), strict=True))
        return weights

    def ids(self, text: Text) -> list[int]:
        """Return the tokens of a text. Tokens are returned as they are."""
        return self.tokenizer.encode(text) if isinstance(text, str) else list(text)


def open_checkpoint(
    path: str | Path | Run,
    device: Device = "cpu",
    *,
    verify: bool = True,
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None,
    plugins: Sequence[str] = (),
) -> Model:
    """Open a run directory (its newest checkpoint), one checkpoint, or a Hugging Face directory.

    The checkpoint may have been written by any layout. `verify` compares each file with its digest first. `dtype` is by
    default the run's working precision. `plugins` names plugins that a checkpoint outside of the user's own run
    directory needs. Raises FrontierError if there is no model, if it is damaged, or if a plugin is not named.
    """
    opened = open_model(path.run_dir if isinstance(path, Run) else path, verified=verify, plugins=plugins)
    run = inference_run(opened.source.model, tensor=1, pipeline=1, world_size=1, device=device)
    with joined(run, None, recorded=False) as (plan, mesh, where):
        model = build_inference_model(opened.source, plan, mesh, where, dtype or opened.dtype, OpsConfig())
    return Model(opened, model)


def evaluate(
    model: Model | Run | str | Path,
    data: str | Path | Sequence[str | Path] | None = None,
    *,
    windows: int = 0,
    batch_size: int = 8,
) -> list[HeldOut]:
    """Return the held-out loss (nats per token), perplexity and bits per byte of each token dataset.

    `data` is the prefix of one dataset, or several prefixes. By default they are the run's held-out sets. `windows`
    limits the number of scored windows (0: all). Raises FrontierError if there is no data or it does not fit the model.
    """
    _at_least(0, windows, "windows")
    _at_least(1, batch_size, "batch_size")
    model = model if isinstance(model, Model) else open_checkpoint(model)
    prefixes = [data] if isinstance(data, str | Path) else list(data or _held_out_sets(model))
    if not prefixes:
        raise DataError("there is nothing to evaluate", "give the prefix of a token dataset", str(model.path))
    return [held_out(model._inference, str(prefix), windows, batch_size) for prefix in prefixes]


def _at_least(least: int, value: int, name: str) -> None:
    if value < least:
        raise ConfigError(
            f"is {value}, expected at least {least}",
            where=name,
            fix=f"give {name}={least} or more",
        )


def _held_out_sets(model: Model) -> list[str]:
    """Return the prefixes of the datasets that the model's run is evaluated on."""
    run = model._opened.run
    blends: Mapping[str, Any] = {} if run is None else run.data.held_out
    return [source.path for blend in blends.values() if not isinstance(blend, str) for source in blend]


def score(model: Model, pairs: Sequence[tuple[Text, Text]], *, batch_size: int = 8) -> list[Likelihood]:
    """Return the log-probability, in nats, of each continuation given its context.

    `pairs` has (context, continuation), each as text or as tokens. An empty context stands for the start of a document.
    Two texts are encoded together, as in `frontier-llm evaluate --task`. Raises FrontierError if a continuation is
    empty or too long.
    """
    _at_least(1, batch_size, "batch_size")
    requests = []
    for number, (context, continuation) in enumerate(pairs):
        if isinstance(context, str) and isinstance(continuation, str):
            request = encode_pair(model.tokenizer, context, continuation)
        else:
            request = (model.ids(context) or [model.tokenizer.eod], model.ids(continuation))
        if not request[1]:
            raise DataError(
                f"the continuation {continuation!r} of {context!r} has no tokens",
                "give a longer text",
                f"pairs[{number}]",
            )
        requests.append(request)
    return score_tokens(model._inference, requests, batch_size)
