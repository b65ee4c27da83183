#!/usr/bin/env bash
# From a fresh clone to a trained model: installs into .venv, makes a dataset from this machine's Python standard
# library, measures this machine, lets the planner choose a layout for 4 local ranks, trains a small Llama in it and
# again as TP2 x PP2, prints the planner's prediction beside both, generates a sample and writes report.html.
# Each part says first how long it will take here, from a first measurement; the end shows announced and measured times.
# A second run reuses the existing files. FRONTIER_LLM_TORCH chooses the torch requirement (default torch==2.13.0).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh

run_dir=runs/quickstart
other_run_dir=runs/quickstart-tp2-pp2
machine=$run_dir/machine.yaml
planned=$run_dir/planned.yaml

say() { printf '\n== %s\n' "$*" >&2; }
# part NAME TEXT: begins a part and says how long it will take
part() {
  local seconds
  seconds="$(python -m frontier_llm.experiments.quickstart begin "$1")" || seconds="time unknown"
  say "$2 ($seconds)"
}

say "a first measurement, from which the seconds of each part follow (5 to 20 s)"
python -m frontier_llm.experiments.quickstart measure || say "the first measurement failed: no time is announced"

part data "tokenizer and token files from the Python standard library"
frontier-llm data stdlib data/stdlib

if [[ ! -f $machine ]]; then
  part calibrate "this machine, measured by 4 ranks"
  frontier-llm calibrate quickstart --ranks 4 --budget-s 10 --emit-machine "$machine" "train.run_dir=$run_dir"
fi

part plan "the planner's layout for it"
# FSDP is left out, because calibrate's rates of FSDP's collectives have not been compared with idle runs yet
frontier-llm plan --run quickstart --machine "$machine" --nodes 1 --fix data_mode=zero --top 4 --emit "$planned"

part "training 1" "training 1 of 2: as planned"
frontier-llm train "$planned" "train.run_dir=$run_dir"

part "training 2" "training 2 of 2: the same run with tensor 2 x pipeline 2"
frontier-llm train quickstart "train.run_dir=$other_run_dir"

part report "prediction beside measurement, time per step; then a sample and the report"
frontier-llm plan --machine "$machine" --measured "$run_dir" "$other_run_dir"

say "a sample"
frontier-llm generate "$run_dir" --prompt 'def read_lines(path):' --max-new-tokens 80 --temperature 0.7 --seed 1 |
  tee "$run_dir/sample.txt"

next="frontier-llm train $planned train.run_dir=runs/longer train.steps=1000      # a longer run, from its start"
frontier-llm report "$run_dir" "$other_run_dir" --machine "$machine" \
  --output "$run_dir/report.html" --sample "$run_dir/sample.txt" \
  --next "$next" >/dev/null

say "done"
python -m frontier_llm.experiments.quickstart end >&2 || say "the table of announced and measured seconds is missing"
cat >&2 <<EOF
report:     $run_dir/report.html
checkpoint: $run_dir/checkpoints
next:       source .venv/bin/activate
            $next
EOF
