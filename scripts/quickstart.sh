#!/usr/bin/env bash
# From a fresh clone to a trained model: installs into .venv, makes a dataset from this machine's Python standard library,
# trains the same small Llama in two layouts (TP2 x PP2, then DP2 x PP2), generates a sample and writes report.html.
# Run twice, it reuses what is there. FRONTIER_LLM_TORCH chooses the torch requirement (default torch==2.13.0).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh

run_dir=runs/quickstart-tp2-pp2
other_run_dir=runs/quickstart-dp2-pp2

say() { printf '\n== %s\n' "$*" >&2; }

say "data: tokenizer and token files from the Python standard library"
frontier-llm data stdlib data/stdlib

say "training 1 of 2: tensor 2 x pipeline 2"
frontier-llm train quickstart "train.run_dir=$run_dir"

say "training 2 of 2: the same run with data 2 x pipeline 2"
frontier-llm train quickstart "train.run_dir=$other_run_dir" parallel.tensor=1 parallel.data=2 parallel.sequence_parallel=false

say "a sample"
frontier-llm generate "$run_dir" --prompt 'def read_lines(path):' --max-new-tokens 80 --temperature 0.7 --seed 1 | tee "$run_dir/sample.txt"

next="frontier-llm train quickstart train.run_dir=$run_dir train.steps=1000      # goes on from the checkpoint"
frontier-llm report "$run_dir" "$other_run_dir" --output "$run_dir/report.html" --sample "$run_dir/sample.txt" --next "$next" >/dev/null

say "done"
cat >&2 <<EOF
report:     $run_dir/report.html
checkpoint: $run_dir/checkpoints
next:       source .venv/bin/activate
            $next
EOF
