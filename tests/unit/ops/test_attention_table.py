"""The attention that `auto` selects comes from data: the shipped table, and the measurements of `ops tune`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from frontier_llm.cli.main import main
from frontier_llm.config.schema import OpsConfig
from frontier_llm.errors import ConfigError
from frontier_llm.ops import AttentionShape, select, select_ops
from frontier_llm.ops.attention_table import load_attention, rule_for


def test_the_shipped_table_has_measured_rules_for_hopper_and_none_for_others() -> None:
    rules = load_attention("shipped")
    for shape, first in (
        (AttentionShape(128, False), "cudnn"),
        (AttentionShape(80, False), "cudnn"),
        (AttentionShape(128, True), "flash_attn"),
    ):
        rule = rule_for(rules, "sm_90", shape)
        assert (rule and rule.order[0]) == first
    assert (
        rule_for(rules, "sm_90", AttentionShape(256, False)) is None
        and rule_for(rules, "gfx90a", AttentionShape(128, False)) is None
    )


def test_the_order_of_the_table_comes_first(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(select, "architecture_of_device", lambda: "sm_90")
    first = select._measured_first("shipped", "cuda", AttentionShape(128, False))
    assert first == ("cudnn", "flash_attn", "sdpa", "triton") and "measured" in capfd.readouterr().err
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    conditions = select.Conditions("cuda", torch.bfloat16)
    outcome = select.choose("attention", "auto", conditions, first)
    assert isinstance(outcome, select.ChosenBackend) and outcome.provider.name == "cudnn"
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert "cuDNN needs an NVIDIA GPU" in str(select.choose("attention", "cudnn", conditions))


def test_mistakes_in_a_table_are_named_at_once(tmp_path: Path) -> None:
    rule = {
        "architecture": "sm_90",
        "head_dim": True,
        "extras": "no",
        "order": ["cudn"],
        "tag": "guessed",
        "source": "here",
    }
    (tmp_path / "table.yaml").write_text(yaml.safe_dump({"rules": [rule, {"order": []}]}))
    with pytest.raises(ConfigError) as error:
        load_attention(str(tmp_path / "table.yaml"))
    text = str(error.value)
    assert all(
        word in text
        for word in (
            "'cudn'",
            "did you mean 'cudnn'",
            "'guessed'",
            "head_dim: must be a number; got True",
            "true or false, without quotes; got 'no'",
            "rules.1",
        )
    )


def test_what_was_timed_is_what_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "attention.yaml"
    assert (
        main(["ops", "tune", "--model", "llama-tiny", "--micro-batch", "1", "--device", "cpu", "--output", str(table)])
        == 0
    )
    said = capfd.readouterr().out
    assert "attention_alibi: " in said and "not triton: triton does not run on cpu" in said
    rules = load_attention(str(table))
    assert {(rule.architecture, rule.head_dim, rule.extras, rule.tag) for rule in rules} == {
        ("cpu", 16, extras, "measured") for extras in (False, True)
    }
    slowest = [{**vars(rule), "order": list(reversed(rule.order))} for rule in rules]
    table.write_text(yaml.safe_dump({"rules": slowest}))
    select_ops(OpsConfig(attention_table=str(table)), "cpu", torch.bfloat16, attention=AttentionShape(16, False))
    assert f"ops attention: {slowest[0]['order'][0]} " in capfd.readouterr().err
