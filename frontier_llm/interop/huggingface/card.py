"""Writes the model card (README.md) of exported weights. The card contains only facts that the run recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from frontier_llm.config import ModelConfig
from frontier_llm.tables import markdown


def model_card(
    architecture: str,
    model: ModelConfig,
    dtype: str,
    files: Sequence[str],
    facts: Mapping[str, object],
) -> str:
    """Return Markdown with YAML front matter for model hubs.

    `facts` are the run's step, tokens, loss, layout and digests.
    """
    shape = {
        "Architecture": architecture, "Layers": model.layers, "Hidden size": model.hidden,
        "Heads (key/value heads)": f"{model.heads} ({model.num_kv_heads})", "MLP width": model.ffn_hidden,
        "Vocabulary": model.vocab_size, "Context": f"{model.sequence_length} tokens", "Positions": model.position,
        "Weights": f"{dtype}, {len(files)} file{'s' if len(files) > 1 else ''}",
    }  # fmt: skip
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [frontier_llm]",
        "---",
        "",
        f"# {model.name}",
        "",
    ]
    lines += [
        "A base language model, pretrained with frontier_llm; not tuned to follow instructions.",
        "",
        *_table("Model", shape),
    ]
    if facts:
        lines += _table("Training run", facts)
    lines += [
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        "```",
        "",
        "The training run recorded no license, evaluation or intended use: the owner of the model adds them here.",
        "",
    ]
    return "\n".join(lines)


def _table(title: str, rows: Mapping[str, object]) -> list[str]:
    return [f"## {title}", "", markdown(("", ""), rows.items()), ""]
