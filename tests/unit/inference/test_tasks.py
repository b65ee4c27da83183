"""Task files: prompts and scores against lm_eval itself on the exported model. Every fault in a file is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from frontier_llm.comm import serial_mesh
from frontier_llm.config import OpsConfig, load_model
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.inference.evaluate import encode_pair, evaluate_task
from frontier_llm.inference.generate import stream
from frontier_llm.inference.model import InferenceModel, build_inference_model, inference_plan
from frontier_llm.inference.sampling import Sampling
from frontier_llm.inference.tasks import read_task, requests, solved
from frontier_llm.interop.huggingface import Companions, HuggingFaceModel, export_huggingface, tokenizer_files
from tests.harness.marks import thorough
from tests.unit.inference.models import RandomWeights

LINES: dict[str, list[dict[str, Any]]] = {
    "arc_easy": [
        {
            "question": f"What is {n} + {n}?",
            "choices": {"text": [str(n), str(2 * n), "no", "maybe so"], "label": list("ABCD")},
            "answerKey": "ABCD"[n % 4],
        }
        for n in range(12)
    ],
    "boolq": [
        {"passage": f"The sky has {n} colours.", "question": f"is {n} a colour", "label": n % 2} for n in range(12)
    ],
    "hellaswag": [
        {
            "activity_label": "Cooking",
            "ctx_a": f"A man [title] cuts {n} onions.",
            "ctx_b": "he then",
            "label": str(n % 4),
            "endings": ["eats [step] them.", f"sings  {n} songs.", "sleeps.", "goes away from the kitchen."],
        }
        for n in range(12)
    ],
    "piqa": [{"goal": f"Open {n} doors", "sol1": "pull the handle", "sol2": "sing", "label": n % 2} for n in range(12)],
    "winogrande": [
        {
            "sentence": f"Ann gave Bob {n} apples because _ was kind.",
            "option1": "Ann",
            "option2": "Bob",
            "answer": str(n % 2 + 1),
        }
        for n in range(12)
    ],
    "wsc273": [
        {
            "text": f"The cup fell on the table {n} times because it was hot. They left.",
            "pronoun": "it",
            "pronoun_loc": 41 + len(str(n)),
            "options": ["The cup", "the table"],
            "label": n % 2,
            "quote": "",
            "quote_loc": 0,
        }
        for n in range(12)
    ],
}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a model with the vocabulary of `bytes`, and its tokenizer."""
    directory = tmp_path_factory.mktemp("model") / "hf"
    model = load_model("llama-tiny", {"vocab_size": 257, "sequence_length": 256})
    tokenizer = load_tokenizer("bytes")
    export_huggingface(
        RandomWeights(model),
        directory,
        torch.float32,
        Companions(tokenizer_files(tokenizer, 256), tokenizer.eod),
    )
    return directory


def model_of(directory: Path) -> InferenceModel:
    source = HuggingFaceModel(directory)
    return build_inference_model(
        source,
        inference_plan(source.model, 1, 1, 1),
        serial_mesh(),
        torch.device("cpu"),
        "fp32",
        OpsConfig(),
    )


SHIPPED = {
    "arc_easy": "arc/arc_easy",
    "boolq": "super_glue/boolq/default",
    "hellaswag": "hellaswag/hellaswag",
    "piqa": "piqa/piqa",
    "winogrande": "winogrande/default",
    "wsc273": "wsc273/default",
}


def write_local_tasks(lm_eval: Any, directory: Path) -> None:
    """Write lm_eval's own task files with only the source of the data changed."""
    shipped = Path(lm_eval.__file__).parent / "tasks"
    for name, lines in LINES.items():
        data = write_lines(directory / f"{name}.jsonl", lines)
        splits = "training_split: null\nvalidation_split: null\ntest_split: test\nfewshot_split: test\n"
        source = f"dataset_path: json\ndataset_name: null\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        head = f"include: {shipped / SHIPPED[name]}.yaml\ntask: local_{name}\ntag: null\n"
        (directory / f"{name}.yaml").write_text(head + source + splits)


@pytest.mark.thorough
@pytest.mark.parametrize("shots", [2, thorough(0)])
def test_prompts_and_scores_equal_lm_eval_on_the_exported_model(
    exported: Path,
    shots: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from frontier_llm.inference.lm_eval_model import FrontierLM

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    write_local_tasks(lm_eval, tmp_path)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    models = {
        "theirs": HFLM(pretrained=str(exported), dtype="float32", device="cpu", batch_size=4),
        "class": FrontierLM(str(exported), device="cpu"),
    }
    results = {
        label: lm_eval.simple_evaluate(
            model=lm,
            tasks=[f"local_{name}" for name in LINES],
            num_fewshot=shots,
            bootstrap_iters=0,
            task_manager=manager,
            log_samples=True,
        )
        for label, lm in models.items()
    }
    model = model_of(exported)
    tokenizer = load_tokenizer(exported)
    for name in LINES:
        task = read_task(name, tmp_path / f"{name}.jsonl")
        ours = evaluate_task(model, tokenizer, task, shots)
        asked = requests(task, shots)
        values = {}
        for label, result in results.items():
            found = result["results"][f"local_{name}"]
            assert found["acc,none"] == pytest.approx(ours.acc, abs=1e-12), (name, label)
            if "acc_norm,none" in found:
                assert found["acc_norm,none"] == pytest.approx(ours.acc_norm, abs=1e-12), (name, label)
            samples = sorted(result["samples"][f"local_{name}"], key=lambda sample: sample["doc_id"])
            texts = [tuple(pair[:2]) for sample in samples for pair in sample["arguments"]]
            assert texts == [(request.context, request.continuation) for request in asked], (name, label)
            values[label] = [float(response[0]) for sample in samples for response in sample["filtered_resps"]]
        # tolerance for sums of up to 40 log-probabilities in fp32
        assert values["class"] == pytest.approx(values["theirs"], abs=2e-4)
        assert len(set(values["theirs"])) > len(LINES[name])


@pytest.mark.thorough
def test_lm_evals_own_command_line_finds_the_model(exported: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    write_local_tasks(lm_eval, tmp_path)
    scripts = (Path(__file__).resolve().parents[3] / "setup.py").read_text()
    assert "frontier-lm-eval = frontier_llm.cli.lm_eval:main" in scripts
    start = [
        sys.executable,
        "-c",
        "import sys; from frontier_llm.cli.lm_eval import main; sys.exit(main())",
    ]
    words = ["--model", "frontier-llm", "--model_args", f"path={exported}", "--device", "cpu", "--tasks", "local_piqa"]
    environment = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [*start, *words, "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (written,) = (tmp_path / "out").rglob("results_*.json")
    task = read_task("piqa", tmp_path / "piqa.jsonl")
    expected = evaluate_task(model_of(exported), load_tokenizer(exported), task)
    assert json.loads(written.read_text())["results"]["local_piqa"]["acc,none"] == pytest.approx(expected.acc)


def test_newer_releases_of_lm_eval_find_the_model_by_its_entry_point() -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.model import LM

    from frontier_llm.inference.lm_eval_model import FrontierLM

    setup = (Path(__file__).resolve().parents[3] / "setup.py").read_text()
    declared = re.search(r'"lm_eval.models": \["(\S+) = (\S+)"\]', setup)
    assert declared and declared[1] == "frontier-llm"
    found = EntryPoint(declared[1], declared[2], "lm_eval.models").load()
    assert found is FrontierLM and issubclass(found, LM)


def test_whole_texts_and_generated_ones_equal_those_of_lm_evals_own_model(exported: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    from frontier_llm.inference.lm_eval_model import FrontierLM

    assert get_model("frontier-llm") is FrontierLM
    ours = FrontierLM(str(exported), device="cpu")
    theirs = HFLM(pretrained=str(exported), dtype="float32", device="cpu", batch_size=1)
    texts = ["a text of some length. " * 30, "short"]  # 690 tokens exceed a context of 256
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(
        theirs.loglikelihood_rolling(rolling, disable_tqdm=True),
        rel=1e-5,
    )
    for options in ({"until": ["zq"], "max_gen_toks": 20}, {"max_tokens": 30, "repetition_penalty": 1.5}):
        asked = [Instance("generate_until", {}, (text, dict(options)), 0) for text in texts]
        assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)
    full = [Instance("generate_until", {}, ("short", {"max_gen_toks": 256}), 0)]
    with pytest.raises(AssertionError, match="must be less than"):
        theirs.generate_until(full, disable_tqdm=True)
    with pytest.raises(ConfigError, match="256 new tokens leave no space"):
        ours.generate_until(full)


def test_generation_arguments_mean_what_they_mean_in_lm_eval() -> None:
    pytest.importorskip("lm_eval")
    from frontier_llm.inference.lm_eval_model import _generation

    drawn = {"temperature": 0.7, "top_k": 40, "seed": 3, "until": "L", "max_completion_tokens": 9}
    assert _generation(drawn) == (Sampling(9, 0.7, top_k=40, seed=3), ("L",))
    assert _generation({"do_sample": True}) == (Sampling(256, 1.0), ())
    assert _generation({"temperature": 0.7, "do_sample": False}) == (Sampling(256, 0.0), ())


def test_generated_texts_do_not_depend_on_their_batch(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from frontier_llm.inference import lm_eval_model

    batches: list[int] = []

    def counted(model: Any, prompts: Any, *arguments: Any) -> Any:
        batches.append(len(prompts))
        return stream(model, prompts, *arguments)

    monkeypatch.setattr("frontier_llm.inference.text.stream", counted)
    lm = lm_eval_model.FrontierLM(str(exported), dtype="fp64", device="cpu", batch_size=4)
    free = {"max_gen_toks": 12}
    ended = {"until": "L", "max_gen_toks": 6, "do_sample": False}
    contexts = ["one", "a text that is cut to its end. " * 10, "", "two", "three", "four", "five", "six"]
    asked = [
        Instance("generate_until", {}, (text, dict(ended if n % 3 == 0 else free)), n)
        for n, text in enumerate(contexts)
    ]
    together = lm.generate_until(asked)
    # requests 0, 3 and 6 end at a stop string; the other five fill one batch and begin another
    assert batches == [3, 4, 1]
    assert together == [lm.generate_until([one])[0] for one in asked]
    assert len(set(together)) > 5 and any(len(text) < 6 for text in together[::3])  # otherwise this test proves nothing


def test_answers_are_judged_by_sum_by_length_and_by_token(exported: Path, tmp_path: Path) -> None:
    model = model_of(exported)
    tokenizer = load_tokenizer(exported)
    lines = [
        {"query": f"Say {n}", "choices": ["a", "a much longer answer than that", "mid size"], "gold": 0}
        for n in range(9)
    ]
    task = read_task("mine", write_lines(tmp_path / "mine.jsonl", lines))
    found = evaluate_task(model, tokenizer, task)
    best = [0, 0, 0]
    for line in lines:
        context = tokenizer.encode(line["query"])
        texts = [tokenizer.encode(" " + choice) for choice in line["choices"]]
        with torch.inference_mode():
            sums = []
            for text in texts:
                ids = torch.tensor(context + text)
                x = model.hidden(ids[:-1, None])
                assert x is not None
                table = model.whole_logits(x)[:, 0].log_softmax(-1)[-len(text) :]
                sums.append(float(table.gather(1, ids[-len(text) :, None]).sum()))
        for way, scale in enumerate(([1, 1, 1], [len(c) for c in line["choices"]], [len(t) for t in texts])):
            scaled = [value / by for value, by in zip(sums, scale, strict=True)]
            best[way] += scaled.index(max(scaled)) == line["gold"]
    assert [found.acc, found.acc_norm, found.acc_token] == pytest.approx([count / 9 for count in best])
    assert found.acc != found.acc_norm  # otherwise this test proves nothing


def test_foundry_prompts(tmp_path: Path) -> None:
    lines = [{"query": f" q{n} ", "choices": ["x", "y"], "gold": n % 2} for n in range(3)]
    piqa = read_task("piqa", write_lines(tmp_path / "piqa.jsonl", lines))
    assert solved(piqa, piqa.prompts[1]) == "q1\nAnswer: y"
    asked = requests(piqa, shots=1)
    assert (
        asked[0].continuation == "\nAnswer: x"
        and asked[0].context.endswith("\nq0")
        and asked[0].context[:2] in ("q1", "q2")
    )
    other = read_task("copa", tmp_path / "piqa.jsonl")
    assert solved(other, other.prompts[0]) == "q0 x"
    schema = [{"context_options": ["The cup", "The table"], "continuation": "was hot", "gold": 0}]
    task = read_task("winograd", write_lines(tmp_path / "schema.jsonl", schema))
    assert [(r.context, r.continuation) for r in requests(task)] == [("The cup", " was hot"), ("The table", " was hot")]
    assert task.is_schema


def test_examples_never_contain_the_question_and_may_come_from_another_file(tmp_path: Path) -> None:
    lines = [{"query": f"query{n}", "choices": ["x", "y"], "gold": 0} for n in range(6)]
    task = read_task("mine", write_lines(tmp_path / "mine.jsonl", lines))
    for request in requests(task, shots=5):
        assert request.context.count(f"query{request.item}") == 1 and request.context.count("query") == 6
    pool = read_task("mine", write_lines(tmp_path / "pool.jsonl", [{"query": "pool", "choices": ["x"], "gold": 0}] * 2))
    assert all(request.context.startswith("pool x\npool x\nquery") for request in requests(task, 2, pool))
    with pytest.raises(DataError, match="too few for 6 examples beside the question itself"):
        requests(task, shots=6)


def test_examples_are_drawn_from_the_complete_file_without_copies_of_the_question(tmp_path: Path) -> None:
    lines = [{"query": f"query{n}", "choices": ["x", "y"], "gold": 0} for n in (0, 0, 0, 1, 2, 3)]
    path = write_lines(tmp_path / "mine.jsonl", lines)
    asked = requests(read_task("mine", path), shots=3)
    few = requests(read_task("mine", path, limit=2), shots=3)
    assert few == asked[:4]
    for request in few:
        assert request.context.count("query0") == 1 and request.context.count("query") == 4
    with pytest.raises(DataError, match="has 4 different questions, too few for 4 examples"):
        requests(read_task("mine", path), shots=4)


def test_pairs_are_cut_where_the_context_ends(exported: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    assert encode_pair(tokenizer, "ab ", "c") == ([97, 98], [32, 99])
    assert encode_pair(tokenizer, "", "c") == ([256], [99])


@pytest.mark.parametrize(
    ("name", "lines", "words"),
    [
        ("piqa", ['{"goal": "g", "sol1": "a", "label": 0}'], [":1", "'sol2'", "expected goal, sol1, sol2, label"]),
        ("mine", ['{"query": "q", "choices": ["a"]}'], [":1", "'gold'", "expected query, choices, gold"]),
        ("mine", ['{"query": "q", "choices": ["a"], "gold": 3}'], ["option 3, counted from 0, of 1"]),
        ("winogrande", ['{"sentence": "no gap", "option1": "a", "option2": ' '"b", ' '"answer": ' '"1"}'], [":1", "unexpected form"]),  # noqa: E501
        ("hellaswag", ['{"activity_label": "a", "ctx_a": "b", "ctx_b": "c", ' '"endings": ' '["d"], ' '"label": ' '""}'], [":1", "unexpected form"]),  # noqa: E501
        ("piqa", ["{"], [":1", "is not JSON"]),
        ("piqa", ["[]"], [":1", "is a JSON list"]),
        ("piqa", [], ["contains no line"]),
        ("picqa", ['{"a": 1}'], ["is not a known task", "did you mean 'piqa'"]),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_task_file_is_named(name: str, lines: list[str], words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        read_task(name, path)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_says_what_to_download(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="download baber/piqa"):
        read_task("piqa", tmp_path / "none.jsonl")
