"""The commands as a user types them: import, generate, evaluate and export, on one rank and on local ranks."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.cli.main import main
from frontier_llm.config import load_model, load_run
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.data.meta import DatasetMeta, write_meta
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.inference.open import open_model
from frontier_llm.interop.huggingface import Companions, export_huggingface, tokenizer_files
from tests.harness.marks import but_first
from tests.unit.inference.models import RandomWeights

BYTES = load_tokenizer("bytes")
MODEL = load_model("llama-tiny", {"vocab_size": 257, "sequence_length": 64})


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with hf/ (a model and its tokenizer), data.bin/.idx and run.yaml."""
    directory = tmp_path_factory.mktemp("commands")
    export_huggingface(
        RandomWeights(MODEL),
        directory / "hf",
        torch.float32,
        Companions(tokenizer_files(BYTES, 64), BYTES.eod),
    )
    text = "the quick brown fox jumps over the lazy dog; " * 20
    with IndexedWriter(directory / "data", np.dtype("<u2")) as writer:
        writer.add_document([*BYTES.encode(text), BYTES.eod])
    write_meta(directory / "data", DatasetMeta("bytes", BYTES.digest, 257, 256, 1, len(text) + 1, len(text)))
    # tokens of a tokenizer that no longer exists
    with IndexedWriter(directory / "others", np.dtype("<u2")) as writer:
        writer.add_document([*BYTES.encode(text), BYTES.eod])
    write_meta(directory / "others", DatasetMeta("gone.model", "0" * 64, 257, 256, 1, len(text) + 1, len(text)))
    run = {
        "model": {"base": "llama-tiny", "vocab_size": 257, "sequence_length": 64},
        "batch": {"global_batch": 4},
        "precision": {"dtype": "fp32"},
        "data": {
            "train": [{"path": str(directory / "data")}],
            "validation": [{"path": str(directory / "data")}],
            "tokenizer": "bytes",
        },
        "train": {"run_dir": str(directory / "run"), "device": "cpu"},
    }
    (directory / "run.yaml").write_text(json.dumps(run))  # JSON is YAML
    assert main(["checkpoint", "import-hf", str(directory / "hf"), str(directory / "run.yaml")]) == 0
    return directory


def answer(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(list(words)) == 0
    return json.loads(capfd.readouterr().out)


def test_the_model_section_of_a_hugging_face_directory_is_printed(
    room: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "import-hf", str(room / "hf")]) == 0
    said = capfd.readouterr().out
    assert "rope_theta: 10000.0" in said and f"{{tokenizer: {room / 'hf'}}}" in said
    run_file = tmp_path / "run.yaml"
    run_file.write_text("batch: {global_batch: 1, micro_batch: 1}\noptimizer: {lr: 1.0e-3}\n")
    with run_file.open("a") as file:
        file.write(said)
    assert load_run(str(run_file), ["data.train=synthetic", "train.steps=1"]).model.rope_theta == 10000.0


def test_an_export_without_a_tokenizer_of_the_run_takes_the_tokenizer_of_its_data(
    room: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["data.tokenizer=null", f"train.run_dir={tmp_path}/run"]
    assert main(["checkpoint", "import-hf", str(room / "hf"), str(room / "run.yaml"), *words]) == 0
    assert main(["checkpoint", "export-hf", f"{tmp_path}/run", f"{tmp_path}/known"]) == 0
    assert load_tokenizer(f"{tmp_path}/known").encode("fox") == BYTES.encode("fox")
    words = ["data.tokenizer=null", f"train.run_dir={tmp_path}/other", f"data.train={room}/others"]
    assert main(["checkpoint", "import-hf", str(room / "hf"), str(room / "run.yaml"), *words]) == 0
    capfd.readouterr()
    assert main(["checkpoint", "export-hf", f"{tmp_path}/other", f"{tmp_path}/unknown"]) == 2
    said = capfd.readouterr().err
    assert "no tokenizer is known" in said and "--tokenizer none to export weights alone" in said


def test_a_tokenizer_of_two_files_is_the_models_too(room: Path, tmp_path: Path) -> None:
    assert open_model(room / "hf").tokenizer_spec == str(room / "hf")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((room / "hf" / name).read_bytes())
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    assert open_model(tmp_path).tokenizer_spec is None
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert open_model(tmp_path).tokenizer_spec == str(tmp_path)


def test_text_streams_to_stdout_and_is_the_same_from_run_and_export(
    room: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for model in ("hf", "run"):
        assert (
            main(["generate", str(room / model), "--prompt=the quick", "--max-new-tokens=20", "--temperature=0"]) == 0
        )
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("the quick") and len(texts[0]) > 15


def test_options_reach_the_sampler(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        return str(
            answer(capfd, "generate", str(room / "run"), "--prompt=ab", "--max-new-tokens=12", "--json", *options)[0][
                "text"
            ]
        )

    greedy = text("--temperature=0")
    assert text("--top-k=1") == greedy == text("--top-p=0.0001") == text("--temperature=0", "--no-cache")
    assert text("--seed=1") == text("--seed=1") != text("--seed=2")
    assert text("--temperature=0", "--repetition-penalty=5") != greedy
    assert text("--temperature=0", f"--stop={greedy[4:6]}") == greedy[: greedy.index(greedy[4:6])]


@pytest.mark.thorough
def test_local_ranks_give_the_same_text_and_the_same_loss(
    room: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prompts = ["--prompt=the quick", "--prompt=-x", "--temperature=0", "--max-new-tokens=8", "--json"]
    generated = answer(capfd, "generate", str(room / "run"), *prompts, "parallel.tensor=2")
    assert generated == answer(capfd, "generate", str(room / "run"), *prompts)
    assert generated[0]["verification"] == "verified against its digests"
    serial = answer(capfd, "evaluate", str(room / "run"), "--json")["held_out"][0]
    evaluated = answer(capfd, "evaluate", str(room / "run"), "--json", "parallel.pipeline=2", "parallel.data=2")
    assert evaluated["verification"] == "verified against its digests"
    parallel = evaluated["held_out"][0]
    assert serial["tokens"] == parallel["tokens"] == 896
    assert serial["loss"] == pytest.approx(parallel["loss"], abs=1e-5)
    assert serial["bits_per_byte"] == pytest.approx(serial["loss"] / np.log(2) * 901 / 900)


def test_tasks_are_scored_and_written(room: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [{"query": f"q{n}", "choices": ["x", "yy"], "gold": n % 2} for n in range(6)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        "evaluate",
        str(room / "hf"),
        f"--task=mine={tmp_path / 't.jsonl'}",
        "--shots=2",
        "--limit=4",
        f"--output={tmp_path / 'o.json'}",
    ]
    assert main(words) == 0
    assert "mine" in capfd.readouterr().out
    content = json.loads((tmp_path / "o.json").read_text())
    assert content["tasks"][0]["items"] == 4 and content["tasks"][0]["shots"] == 2 and content["held_out"] == []


@pytest.mark.parametrize(
    "words",
    [["evaluate"], ["generate", "--prompt=a", "--max-new-tokens=2"]],
    ids=["evaluate", "generate"],
)
@pytest.mark.parametrize("ranks", but_first([[], ["parallel.tensor=2"]]), ids=str)
def test_a_flipped_byte_is_named_and_ends_the_command(
    room: Path,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: list[str],
    ranks: list[str],
) -> None:
    shutil.copytree(room / "run", tmp_path / "run")
    (shard,) = (tmp_path / "run" / "checkpoints").glob("step_*/shard_*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 4] ^= 1  # damages a master weight by one bit
    shard.write_bytes(content)
    command, *options = words
    assert main([command, str(tmp_path / "run"), *options, *ranks, "--json"]) == 2
    said = capfd.readouterr()
    assert (
        f"{shard}: is damaged: digest" in said.err
        and "--no-verify reads it without checks" in said.err
        and not said.out
    )
    assert main([command, str(tmp_path / "run"), *options, *ranks, "--json", "--no-verify"]) == 0
    said = capfd.readouterr()
    assert "not verified (--no-verify)" in said.err
    damaged = json.loads(said.out)
    assert (damaged if command == "evaluate" else damaged[0])["verification"] == "not verified (--no-verify)"
    if not ranks:  # intact weights on several ranks: test_local_ranks_give_the_same_text_and_the_same_loss
        intact = answer(capfd, command, str(room / "run"), *options, "--json")
        assert (intact if command == "evaluate" else intact[0])["verification"] == "verified against its digests"


def test_the_way_back(room: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["checkpoint", "export-hf", str(room / "run"), str(tmp_path / "out")]) == 0
    assert "LlamaForCausalLM" in capfd.readouterr().out
    weights = [(room / "hf" / "model.safetensors"), (tmp_path / "out" / "model.safetensors")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 256
    assert "| Steps | 0 |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "{room}/none"], "does not exist"),
        (["generate", "{room}"], "is not a model"),
        (["generate", "{room}/run", "--temperature=-1"], "--temperature: -1.0 is not 0"),
        (["generate", "{room}/run", "--top-p=2"], "--top-p: 2.0 is not in (0, 1]"),
        (["generate", "{room}/run", "--tokenizer={room}/none.json"], "no such tokenizer"),
        (["generate", "{room}/run", "--prompt-file={room}/none"], "none: No such file or directory"),
        (["generate", "{room}/run", "parallel.tensor=3"], "set parallel.tensor to one of [1, 2]"),
        (
            ["evaluate", "{room}/run", "parallel.pipeline=9"],
            "parallel.pipeline: 9 stages = 9 virtual stages, more than the 4 layers\n    fix: "
            "lower parallel.pipeline to at most 4 virtual stages\n",
        ),
        (["evaluate", "{room}/hf"], "there is nothing to evaluate"),
        (["evaluate", "{room}/run", "--task=piqa"], "NAME=FILE"),
        (["evaluate", "{room}/run", "--output={room}/none/o.json"], "o.json cannot be written"),
        (["evaluate", "{room}/run", "--data={room}/none"], "no such file"),
        (
            ["evaluate", "{room}/run", "--data={room}/others"],
            "others: was made by the tokenizer gone.model, but the model's tokenizer is bytes",
        ),
        (["checkpoint", "import-hf", "{room}/hf", "{room}/run.yaml", "model.heads=8"], "set model.heads=4"),
        (["checkpoint", "import-hf", "{room}/hf", "{room}/run.yaml"], "already contains step_00000000"),
        (["checkpoint", "export-hf", "{room}/run", "{room}/hf"], "is not empty"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(
    room: Path,
    words: list[str],
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main([word.replace("{room}", str(room)) for word in words]) == 2
    message = capfd.readouterr().err
    assert said in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "{tmp}"], "--output: {tmp} cannot be written"),
        (["--figures", "{tmp}/none/f.png"], "--figures: {tmp}/none/f.png cannot be written"),
        (["--figures", "{tmp}/f.xyz"], "--figures: {tmp}/f.xyz has no ending of a figure"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_opened(
    tmp_path: Path, words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(tmp_path / "no-model"), *(word.format(tmp=tmp_path) for word in words)]) == 2
    message = capfd.readouterr().err
    assert said.format(tmp=tmp_path) in message and "no-model" not in message


def test_results_are_printed_before_they_are_written(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr("frontier_llm.cli.evaluate.write_atomically", full)
    assert main(["evaluate", str(room / "run"), "--windows=1", f"--output={tmp_path / 'o.json'}"]) != 0
    assert "perplexity" in capfd.readouterr().out


def test_results_are_written_if_they_cannot_be_printed(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a closed pipe (| head) lost the files."""

    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("frontier_llm.cli.evaluate.show", closed)
    output = tmp_path / "o.json"
    figure = tmp_path / "o.svg"
    words = ["--windows=1", "--positions=2", f"--output={output}", f"--figures={figure}"]
    with suppress(BrokenPipeError):
        main(["evaluate", str(room / "run"), *words])
    assert json.loads(output.read_text())["held_out"] and figure.is_file()


def test_a_tokenizer_of_another_size_is_refused(room: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    export_huggingface(RandomWeights(load_model("llama-tiny")), tmp_path / "small", torch.float32)
    assert main(["generate", str(tmp_path / "small"), "--tokenizer=bytes"]) == 2
    assert "has 257 ids, more than the 250 of the model's vocabulary" in capfd.readouterr().err


def test_tokens_that_read_the_same_belong_to_the_model(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # the exported tokenizer.json has another digest than `bytes`, the tokenizer of the data
    assert main(["evaluate", str(room / "hf"), f"--data={room / 'data'}", "--windows=1"]) == 0
    assert "held-out data" in capfd.readouterr().out


def test_a_gpu_where_there_is_none(
    room: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["generate", str(room / "run"), "--device=cuda"]) == 2
    said = capfd.readouterr().err
    assert (
        "sees no GPU, but --device cuda needs one\n    fix: check the modules" in said and "or set --device cpu" in said
    )


def test_a_generation_beyond_the_context_says_so(room: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(room / "run"), "--prompt=the quick", "--max-new-tokens=60", "--temperature=0"]) == 0
    assert "the model's context of 64 tokens has space for only 55 of the 60 new tokens" in capfd.readouterr().err


def test_json_is_strict_where_a_number_does_not_exist(
    room: Path,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"query": "q", "choices": ["x", "yy"], "gold": 0}))
    assert main(["evaluate", str(room / "hf"), f"--task=one={tmp_path / 't.jsonl'}", "--json"]) == 0
    content = json.loads(capfd.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert content["tasks"][0]["stderr"] is None  # a single question has no standard error
