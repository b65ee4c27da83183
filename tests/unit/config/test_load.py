"""Tests how run files are composed and overridden, and the messages about errors in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from frontier_llm.config import RunConfig, available, build, dump, find_file, load_model, load_run, model_problems
from frontier_llm.config.load import MAXIMUM_BYTES, merge, parse_overrides
from frontier_llm.errors import ConfigError


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    return write(tmp_path / "run.yaml", "model: gpt-tiny\nbatch: {global_batch: 8}\n")


def test_defaults_and_named_model(run_file: str) -> None:
    config = load_run(run_file)
    assert config.model.name == "gpt-tiny"
    assert config.model.position == "learned"  # the value comes from gpt-22b, the base of gpt-tiny
    assert config.model.layers == 4
    assert config.parallel.schedule == "1f1b"


def test_overrides_win_and_are_typed(run_file: str) -> None:
    config = load_run(
        run_file,
        ["train.steps=7", "optimizer.lr=1e-3", "data.validation=null", "parallel.stage_layers=[3,1]", "model.layers=2"],
    )
    assert (config.train.steps, config.optimizer.lr, config.data.validation) == (7, 1e-3, None)
    assert config.parallel.stage_layers == (3, 1)
    assert config.model.layers == 2 and config.model.name == "gpt-tiny"


def test_a_model_can_be_replaced_by_override(run_file: str) -> None:
    assert load_run(run_file, ["model=llama-tiny"]).model.position == "rope"


def test_bases_compose_and_the_nearer_file_wins(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(
        tmp_path / "sub" / "ground.yaml",
        "model: gpt-tiny\nbatch: {global_batch: 8, micro_batch: 2}\ntrain: {steps: 3, seed: 1}\n",
    )
    write(tmp_path / "middle.yaml", "base: sub/ground.yaml\ntrain: {steps: 4}\n")
    top = write(tmp_path / "top.yaml", "base: middle.yaml\nbatch: {global_batch: 16}\nmodel: {layers: 6}\n")
    config = load_run(top)
    assert (config.batch.global_batch, config.batch.micro_batch) == (16, 2)
    assert (config.train.steps, config.train.seed, config.model.layers, config.model.hidden) == (4, 1, 6, 64)


def test_bases_that_go_in_a_circle_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    with pytest.raises(ConfigError, match=r"circular: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_run(str(tmp_path / "a.yaml"))
    write(tmp_path / "m.yaml", "base: m.yaml\nlayers: 3\n")
    with pytest.raises(ConfigError, match="circular"):
        load_model(str(tmp_path / "m.yaml"))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.stpes=3", "train.stpes: unknown key\n.*did you mean 'steps'"),
        ("model.hiden=3", "model.hiden: unknown key\n.*did you mean 'hidden'"),
        ("lr=3", "lr: unknown key\n.*did you mean 'optimizer.lr'"),
        ("tensor=2", "did you mean 'parallel.tensor'"),
        ("optimiser.lr=3", "did you mean 'optimizer'"),
    ],
)
def test_an_unknown_key_gets_the_closest_valid_one(run_file: str, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_run(run_file, [override])


def test_a_wrong_key_is_looked_for_where_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("base: quickstart\ntrain: {step: 5}\n")
    with pytest.raises(ConfigError) as error:
        load_run("mine.yaml", ["optimizer.lr=high", "data.train.0.weight=2"])
    assert [problem.where for problem in error.value.problems] == [
        "command line: optimizer.lr",
        "command line: data.train",
        "mine.yaml: train.step",
    ]
    with pytest.raises(ConfigError, match=r"did you mean mine\.yaml\?"):
        load_run("mine")


def test_all_violations_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path / "bad.yaml",
        "model: {base: gpt-tiny, layers: 0}\nbatch: {}\ntrain: {steps: soon, sped: 1}\nprecision: {dtype: fp8}\n",
    )
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    places = [problem.where.removeprefix(f"{path}: ") for problem in caught.value.problems]
    assert sorted(places) == ["batch.global_batch", "model.layers", "precision.dtype", "train.sped", "train.steps"]
    assert "got 'soon'" in str(caught.value) and "got 0" in str(caught.value)


def test_a_path_alone_is_a_dataset(run_file: str) -> None:
    expected = load_run(
        run_file,
        ["data.train=[{path: a/b}]", "data.validation=[{path: c}, {path: d, weight: 2}]"],
    ).data
    assert load_run(run_file, ["data.train=a/b", "data.validation=[c, {path: d, weight: 2}]"]).data == expected
    assert load_run(run_file, ["data.train=synthetic"]).data.train == "synthetic"


def test_the_home_directory_is_meant_by_its_sign(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    run = load_run(run_file, ["train.run_dir=~/run", "data.train=~/a~b", "data.tokenizer=bytes"])
    assert (run.train.run_dir, run.data.train[0].path, run.data.tokenizer) == ("/home/me/run", "/home/me/a~b", "bytes")  # type: ignore[union-attr]


def test_a_missing_section_says_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(write(tmp_path / "empty.yaml", "{}\n"))
    assert "add `model:` or `model: NAME`" in str(caught.value) and "add `batch:`" in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n", "key: [unclosed\n", "\xff"])
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"odd\.yaml"):
        load_run(str(path))


@pytest.mark.parametrize("filler", ["x", "é", "語"])
def test_a_file_that_is_too_long_is_refused_and_never_cut(tmp_path: Path, filler: str) -> None:
    """If the file were cut at the limit, the keys after it would be lost. The limit counts bytes, also if characters
    have several bytes.
    """
    comment = "#" + filler * (MAXIMUM_BYTES // len(filler.encode()))
    path = write(tmp_path / "long.yaml", f"model: gpt-tiny\n{comment}\nbatch: {{global_batch: 8}}\n")
    with pytest.raises(ConfigError, match=r"long\.yaml: has more than 131,072 bytes"):
        load_run(path)


def test_an_unknown_name_gets_the_closest_file() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama-tiny'"):
        find_file("llama-tinny", "models")
    with pytest.raises(ConfigError, match="gpt-175b is a model, not a run: use a run that trains it"):
        load_run("gpt-175b")
    # the file system refuses the first three names
    for name in ("a" * 5000, "a" * 300 + ".yaml", "llama\0tiny.yaml", "../models/llama-tiny"):
        with pytest.raises(ConfigError, match="no model file"):
            find_file(name, "models")


@pytest.mark.parametrize("word", ["train.steps", "=3", "train..steps=3", ".steps=3"])
def test_malformed_overrides_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="not of the form key=value"):
        parse_overrides([word])


def test_contradicting_overrides_are_refused() -> None:
    with pytest.raises(ConfigError, match="sets a key of 'train', which another argument sets"):
        parse_overrides(["train=3", "train.steps=4"])
    with pytest.raises(ConfigError, match="train=3: sets 'train' to a value without keys, and another argument"):
        parse_overrides(["train.steps=4", "train=3"])


def test_a_section_that_is_set_after_one_of_its_keys_keeps_the_key() -> None:
    words = ["train.run_dir=a", "train={steps: 3}", "model.layers=2", "model=llama-tiny", "train={steps: 4}"]
    assert parse_overrides(words) == {
        "train": {"run_dir": "a", "steps": 4},
        "model": {"layers": 2, "base": "llama-tiny"},
    }


def test_all_malformed_overrides_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["a", "b", "train.steps=1"])
    assert [problem.where for problem in caught.value.problems] == ["a", "b"]


leaves = st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3)
mappings = st.dictionaries(st.sampled_from("xyz"), leaves, max_size=3)


@given(mappings, mappings, mappings)
def test_merge_takes_every_key_and_the_right_side_wins(left: dict, middle: dict, right: dict) -> None:
    merged = merge(left, right)
    assert merged.keys() == left.keys() | right.keys()
    for key, section in merged.items():
        assert section == {**left.get(key, {}), **right.get(key, {})}
    assert merge(merge(left, middle), right) == merge(left, merge(middle, right))


def test_merge_replaces_what_is_not_a_mapping_on_both_sides() -> None:
    assert merge({"a": {"b": 1}, "c": 1}, {"a": 2, "c": {"d": 3}}) == {"a": 2, "c": {"d": 3}}


@pytest.mark.parametrize("name", available("models"))
def test_every_shipped_model_is_valid(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert list(model_problems(model)) == []
    assert (
        model.padded_vocab_size % model.vocab_multiple
        == 0
        <= model.padded_vocab_size - model.vocab_size
        < model.vocab_multiple
    )


def test_the_shapes_of_ornl_have_their_names_sizes() -> None:
    """12 L H^2 + V H parameters are 22 B, 175 B and 1 T within 4 %."""
    for name, published in (("gpt-22b", 22e9), ("gpt-175b", 175e9), ("gpt-1t", 1e12)):
        model = load_model(name)
        parameters = 12 * model.layers * model.hidden**2 + model.padded_vocab_size * model.hidden
        assert parameters == pytest.approx(published, rel=0.04)


def test_a_dumped_config_loads_back_equal(run_file: str, tmp_path: Path) -> None:
    config = load_run(run_file, ["data.train=[{path: a, weight: 2}]", "parallel.pipeline=2"])
    assert load_run(write(tmp_path / "again.yaml", dump(config))) == config
    assert build(RunConfig, yaml.safe_load(dump(config))) == config


def test_configs_are_frozen(run_file: str) -> None:
    config = load_run(run_file)
    with pytest.raises(ValidationError):
        config.train.steps = 3


@pytest.mark.parametrize(
    ("overrides", "where", "fix"),
    [
        ({"heads": 7, "position": "alibi"}, "model.heads", r"one of \[4, 8\]"),
        ({"kv_heads": 3}, "model.kv_heads", r"one of \[2, 4\]"),
        ({"rope_fraction": 0.2}, "model.rope_fraction", "even"),
        ({"rope_fraction": 0.001}, "model.rope_fraction", "at least 2"),
        ({"norm_bias": True}, "model.norm_bias", "norm: layernorm"),
    ],
)
def test_impossible_shapes_are_explained(overrides: dict, where: str, fix: str) -> None:
    (problem, *others) = model_problems(load_model("llama-tiny", {"kv_heads": None, **overrides}))
    assert (problem.where, others) == (where, [])
    assert re.search(fix, problem.fix), problem.fix


def test_naming_a_model_replaces_the_whole_model() -> None:
    config = load_run("bench", ["model=llama-tiny", "model.layers=2"])
    assert config.model == load_model("llama-tiny", {"layers": 2})
    assert load_run("bench", ["model.layers=2"]).model == load_model("bench-l8-h384", {"layers": 2})


def test_a_later_null_removes_a_section_with_its_keys() -> None:
    assert load_run("moe_small", ["model.moe.top_k=2", "model.moe=null"]).model.moe is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=abc", "train.steps: must be a whole number; got 'abc'"),
        ("parallel=3", "parallel: must be a section of keys; got 3"),
        ("precision.dtype=bf17", "did you mean 'bf16'?"),
        ("data.train=7", "data.train: must be a list, or 'synthetic'; got 7"),
        ("data.train=[{path: x}, {paht: y}]", "data.train.1.paht: unknown key"),
        ("optimizer.betas=[1,2,3]", "optimizer.betas: must have at most 2 entries"),
        ("optimizer.betas=[0.9]", "optimizer.betas: must have at least 2 entries; got [0.9]"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1: must be below 1"),
        ("train.keep_checkpoints=1", "must be 2 or more"),
        ("train.steps='5'", "train.steps: must be a number, without quotes; got '5'"),
        ("optimizer.lr='0.1'", "optimizer.lr: must be a number, without quotes; got '0.1'"),
        ("optimizer.betas=['0.9', 0.95]", "optimizer.betas: must be a number, without quotes; got ['0.9', 0.95]"),
        ("train.loss_weights={output-z: '1'}", "train.loss_weights: must be a number, without quotes"),
        ("parallel.zero=true", "parallel.zero: must be a number; got True"),
        ("train.tensorboard='yes'", "train.tensorboard: must be true or false, without quotes; got 'yes'"),
        ("train.tensorboard=1", "train.tensorboard: must be true or false, without quotes; got 1"),
    ],
)
def test_wrong_values_are_told_in_the_words_of_a_run_file(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run("train_small", [override])
    text = str(caught.value)
    assert expected in text
    assert not re.search(r"Input should|valid (tuple|dictionary)|tuple\[|literal\[", text)


@pytest.mark.parametrize(
    ("key", "largest"),
    [
        ("model.layers", 65_536),
        ("model.hidden", 1 << 24),
        ("model.ffn_hidden", 1 << 24),
        ("model.heads", 65_536),
        ("model.vocab_size", (1 << 31) - 1),
        ("model.sequence_length", 1 << 30),
        ("batch.global_batch", 1 << 24),
        ("batch.micro_batch", 1 << 20),
        ("parallel.tensor", 1 << 20),
        ("parallel.pipeline", 1 << 20),
        ("parallel.data", 1 << 20),
        ("parallel.chunks", 65_536),
        ("train.keep_checkpoints", 1_000_000),
    ],
)
def test_an_absurd_size_is_refused_by_the_schema(run_file: str, key: str, largest: int) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}: must be {largest} or less; got {largest + 1}"):
        load_run(run_file, [f"{key}={largest + 1}"])
    section, name = key.split(".")
    assert getattr(getattr(load_run(run_file, [f"{key}={largest}"]), section), name) == largest


def test_a_key_written_twice_is_an_error_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("base: train_small\ntrain:\n  steps: 5\n  seed: 1\n  steps: 6\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: 'steps' is written twice, in lines 3 and 5"):
        load_run(str(path))
    with pytest.raises(ConfigError, match="'steps' is written twice"):
        load_run("train_small", ["train={steps: 1, steps: 2}"])


def test_1e3_is_a_number_where_one_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("base: train_small\ntrain: {steps: 1e3, run_dir: 1e3}\n")
    run = load_run(str(path), ["train.eval_samples=2E+2", "optimizer.lr=1e-3"])
    assert (run.train.steps, run.train.run_dir, run.train.eval_samples, run.optimizer.lr) == (1000, "1e3", 200, 1e-3)
    for wrong in ("1e-3", "1.5e0", "1e400", "1e13"):
        with pytest.raises(ConfigError, match=r"train\.steps: must be "):
            load_run(str(path), [f"train.steps={wrong}"])


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optimizer.lr=1e-4", "optimizer", "lr", 1e-4),  # YAML loads it as text
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("train.steps=4.0", "train", "steps", 4),
        ("train.tensorboard=yes", "train", "tensorboard", True),  # a boolean of YAML
        ("train.profile={steps: 3}", "train", "profile", {"steps": "3", "ranks": (0,), "memory_snapshot": False}),
    ],
)
def test_a_value_may_be_written_as_yaml_users_write_it(override: str, section: str, key: str, value: object) -> None:
    found = getattr(getattr(load_run("train_small", [override]), section), key)
    assert (found.model_dump() if key == "profile" else found) == value


def test_a_file_that_is_there_but_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"the name of a run file must end in \.yaml"):
        load_run(str(tmp_path / "run.jsonl"))


@pytest.mark.parametrize("value", ["before", "after"])
def test_a_removed_key_of_an_old_run_file_is_read_with_a_notice(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    value: str,
) -> None:
    path = write(tmp_path / "run.yaml", f"base: train_small\noptimizer: {{validated: {value}}}\n")
    assert load_run(path) == load_run("train_small")
    assert capsys.readouterr().err.count("optimizer.validated has no effect any more") == 1
    assert "validated" not in dump(load_run(path))


def test_another_value_of_a_removed_key_is_an_unknown_key(run_file: str) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.validated: unknown key"):
        load_run(run_file, ["optimizer.validated=never"])
