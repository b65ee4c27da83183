"""frontier-lm-eval: lm-evaluation-harness's command line, in a process that has registered `--model frontier-llm`."""

from __future__ import annotations

import sys

from frontier_llm.cli.needs import check_installed
from frontier_llm.errors import FrontierError


def main() -> None:
    """Run lm_eval's command line with its arguments. Exits with 2 if lm_eval or torch is not installed."""
    try:
        check_installed(["frontier-lm-eval"])
    except FrontierError as error:
        print(f"frontier-lm-eval: error\n{error}", file=sys.stderr)
        sys.exit(error.exit_code)
    from lm_eval.__main__ import cli_evaluate

    import frontier_llm.inference.lm_eval_model  # noqa: F401  registers the model class

    cli_evaluate()


if __name__ == "__main__":
    main()
