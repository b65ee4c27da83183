"""Lists the options and arguments of all commands, each with one meaning in all commands, and the former names that are
still accepted.

A setting of a run has the name of its key in every command: `parallel.tensor=8`, `batch.global_batch=512`,
`train.steps=100`. A value that is not a setting of the run has one option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frontier_llm import log
from frontier_llm.errors import ConfigError

# option → meaning of its value, the same in every command that has the option
OPTIONS = {
    "--account": "project that Slurm charges",
    "--all": "all working precisions",
    "--allow-change": "key of a run that may differ from the checkpoint's",
    "--allow-cross-node-tp": "tensor parallelism beyond the node",
    "--batch-per-replica": "sequences per step and replica",
    "--batch-size": "sequences that inference computes at once",
    "--budget-s": "seconds that measurements may take",
    "--characters": "characters of a sample that are shown",
    "--chrome-trace": "simulated pipeline as a trace file that is written",
    "--column": "column of a table",
    "--compare-nodes": "other node counts to compare with",
    "--continue-with": "what follows an unfinished slice",
    "--data": "dataset that is evaluated",
    "--dependency": "Slurm's dependency on another job",
    "--device": "device that computes",
    "--documents": "unit of a text file that is one document",
    "--dry-run": "check and show, without training, measuring or queueing",
    "--dtype": "working precision",
    "--emit": "run file that is written",
    "--emit-algorithms": "algorithm table that is written",
    "--emit-machine": "machine file that is written",
    "--exclude": "hosts to avoid",
    "--exhaustive": "trial of every layout",
    "--explain": "step and memory line by line",
    "--failed-start-node-hours": "node-hours of failed starts that end a run",
    "--fallback-plan": "layout that needs less memory, for a run that is out of memory",
    "--figures": "figures that are written",
    "--fix": "layout choice that a search keeps",
    "--follow": "evaluation of each new checkpoint until the run ends",
    "--force": "section that may pass without a check",
    "--hang-test": "test of the modes of comm.in_flight",
    "--help": "help",
    "--html": "HTML page that is written",
    "--in-job": "work on the nodes of this allocation",
    "--installation": "check of the interpreter alone",
    "--json": "machine-readable result",
    "--layouts": "number of layouts in a search",
    "--leave-out": "samples that are left out",
    "--limit": "questions per task",
    "--machine": "machine file that is read",
    "--max": "largest message",
    "--max-mib": "limit of a line or shard of the input",
    "--max-new-tokens": "tokens that are generated per prompt",
    "--max-node-hours": "budget of node-hours",
    "--measured": "run directories whose measurements are compared",
    "--memory-from": "run whose measured memory is written",
    "--mib-per-s": "limit of the rate of an upload",
    "--micro-batch": "sequences of a microbatch without a run",
    "--min": "smallest message",
    "--min-p": "min-p sampling",
    "--model": "model file",
    "--needles": "needles per depth",
    "--next": "command that a report suggests",
    "--no-cache": "generation without a cache",
    "--no-jit": "refusal to compile",
    "--no-preflight": "no doctor on the nodes first",
    "--no-pairs": "no messages between pairs of ranks",
    "--notice-command": "command that receives notices",
    "--no-verify": "no comparison with digests",
    "--nodes": "number of nodes",
    "--output": "file or directory of the command's result",
    "--overwrite": "replacement of existing files",
    "--partition": "Slurm's partition",
    "--plugin": "plugin to import",
    "--positions": "parts of the window with a loss of their own",
    "--preflight": "doctor on every node first",
    "--private": "private repository of the Hub",
    "--prompt": "prompt",
    "--prompt-file": "file of prompts",
    "--prompt-key": "JSON field that is read and not learnt",
    "--push-to-hub": "repository of the Hub",
    "--qos": "Slurm's quality of service",
    "--ranks": "number of local ranks",
    "--repeats": "repetitions of each measurement",
    "--repetition-penalty": "repetition penalty",
    "--restart-source": "dataset that is read from its beginning",
    "--rows": "every row of a table",
    "--run": "run file, in commands that can do without one",
    "--run-dir": "directory to check, without a run",
    "--sample": "text file with a generated sample",
    "--sample-mib": "text that a tokenizer is trained on",
    "--samples": "documents or samples that are shown",
    "--sbatch": "options of sbatch",
    "--seed": "seed of a command's own draws",
    "--sequence-length": "length of sequences, without a run",
    "--shard-gib": "size of the written files of weights",
    "--shard-mib": "input per resumable part",
    "--shots": "solved examples",
    "--shots-from": "file of solved examples",
    "--side-by-side": "points of a series at the same time",
    "--simulate": "planner's numbers instead of runs",
    "--site": "site file",
    "--skip-damaged": "damaged inputs are left out",
    "--spares": "spare nodes",
    "--stack": "software stack of the machine file",
    "--step": "one step of a run",
    "--step-limit": "seconds after which a step has hung",
    "--steps": "steps that are measured",
    "--stop": "text that ends generation",
    "--strict": "stop at a damaged checkpoint",
    "--take-over": "URL that another run directory has written",
    "--task": "in-context task",
    "--temperature": "sampling temperature",
    "--text-key": "JSON field of the text",
    "--this-node": "this node alone",
    "--time": "walltime",
    "--timeout": "seconds until a silent node is bad",
    "--tokenizer": "tokenizer",
    "--tokens": "token budget of a plan",
    "--top": "number of rows that are shown",
    "--top-k": "top-k sampling",
    "--top-p": "top-p sampling",
    "--trials": "number of trials",
    "--validate": "measurements that the planner is scored against",
    "--vocab-size": "ids of a vocabulary, without a run",
    "--webhook-file": "file with the address that receives notices",
    "--what-if": "changed choice to compare with",
    "--windows": "context windows per dataset",
    "--within": "slowest layout of a search, relative to the best",
    "--workers": "processes",
}

# name of a positional argument → meaning of its value
ARGUMENTS = {
    "ARCHITECTURE": "GPU architecture",
    "CHECKPOINT": "run directory (its newest checkpoint) or one checkpoint's folder",
    "DIR": "directory that is neither a run's nor a checkpoint's",
    "INPUT": "text to tokenize or tokens to import",
    "MODEL": "name in configs/models, or the path of a model file",
    "PREFIX": "dataset: path without .bin/.idx",
    "RUN": "name in configs/runs, or the path of a run file",
    "RUN_DIR": "run directory",
    "URL": "folder of an object store",
    "kind": "kind of shipped things",
    "key=value": "changed key of a run",
    "shell": "shell",
}


@dataclass(frozen=True)
class OldName:
    """A former option of a command. The command accepts it with a notice. The help does not list it.

    `new` is an option, or the key of a run. `value` is the form of the key's value: `{}` stands for the typed text.
    """

    command: str
    old: str
    new: str
    value: str = "{}"

    @property
    def is_key(self) -> bool:
        """Return True if a key=value word replaces the option and its value."""
        return not self.new.startswith("-")


OLD_NAMES = (
    OldName("train", "--check", "--dry-run"),
    OldName("submit", "--until-tokens", "train.steps", "{} tokens"),
    OldName("plan", "--global-batch", "batch.global_batch"),
    OldName("plan", "--sequence-length", "model.sequence_length"),
    OldName("scaling strong", "--global-batch", "batch.global_batch"),
    OldName("tune", "--budget-node-hours", "--max-node-hours"),
    OldName("calibrate", "--output", "--emit-machine"),
    OldName("bench comm", "--machine-file", "--emit-machine"),
    OldName("bench comm", "--emit", "--emit-algorithms"),
    OldName("bench comm", "--heatmap", "--figures"),
    OldName("bench comm", "--times", "--steps"),
    OldName("evaluate", "--figure", "--figures"),
    OldName("evaluate", "--tensor", "parallel.tensor"),
    OldName("evaluate", "--pipeline", "parallel.pipeline"),
    OldName("evaluate", "--expert", "parallel.expert"),
    OldName("evaluate", "--data-parallel", "parallel.data"),
    OldName("generate", "--tensor", "parallel.tensor"),
    OldName("generate", "--pipeline", "parallel.pipeline"),
    OldName("generate", "--expert", "parallel.expert"),
)


def with_new_names(words: Sequence[str]) -> list[str]:
    """Return a command line with each former option replaced by its new name. Logs a notice for each replacement.

    Raises ConfigError if a value is given under its former and its new name.
    """
    former = {row.old: row for row in OLD_NAMES if list(words[: row.command.count(" ") + 1]) == row.command.split()}
    renamed: list[str] = []
    replaced: list[tuple[OldName, str]] = []
    rest = iter(words)
    for word in rest:
        flag, has_value, text = word.partition("=")
        row = former.get(flag)
        if row is None:
            renamed.append(word)
            continue
        if row.is_key:
            value = text if has_value else next(rest, "")
            new_words = f"{row.new}={row.value.format(value)}"
        else:
            new_words = f"{row.new}={text}" if has_value else row.new
        replaced.append((row, new_words))
        renamed.append(new_words)
    for row, new_words in replaced:
        given = [word for word in renamed if word.partition("=")[0] == row.new]
        if len(given) > 1:
            raise ConfigError(f"{row.old} is the former name of {row.new}", f"write {row.new} once", row.old)
        _notice(f"{row.old} is now called {row.new}: write {new_words}")
    return renamed


def _notice(text: str) -> None:
    """Log a notice, on one rank if a launcher started this process."""
    from frontier_llm.run.rank_env import discover

    place = discover()
    if place is None or place.rank == 0:
        log.info(text)
