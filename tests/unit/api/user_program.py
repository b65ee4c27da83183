"""A small user program that mypy checks. If a public name had no type, mypy would report the `type: ignore` comments
below as unused, which is an error.
"""

from __future__ import annotations

import frontier_llm

run = frontier_llm.load_run("quickstart", {"train.steps": 5})
chosen = frontier_llm.plan(run, machine="frontier", nodes=1)
seconds: float = chosen.step_s


def main() -> None:
    result = frontier_llm.train(run)
    first: float = result.losses[1]
    wrong: int = result.run_dir  # type: ignore[assignment]
    model = frontier_llm.open_checkpoint(result.run_dir)
    scores: str = frontier_llm.score(model, [("a", "b")])  # type: ignore[assignment]
    trainer = frontier_llm.Trainer(run)
    loss: str = trainer.step([[0]]).loss  # type: ignore[assignment]
    print(first, wrong, scores, loss, seconds)
