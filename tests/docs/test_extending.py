"""docs/extending.md, executed: each worked example enters by the documented door and trains as the serial oracle does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from frontier_llm.cli.checks import check
from frontier_llm.config import load_run
from frontier_llm.config.plugins import import_plugins
from frontier_llm.errors import ConfigError, LayoutError
from frontier_llm.topology import make_plan
from tests.docs.pages import ROOT
from tests.harness.pool import RankPool
from tests.oracle.optimizers import momentum
from tests.parity.cases import STEPS, Case
from tests.parity.compare import differences, gather
from tests.parity.play import Played, play
from tests.parity.witness import witness

TOLERANCE = 1e-11


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's Python, as the one file of a user."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    assert len(blocks) == 3
    path = tmp_path_factory.mktemp("extensions") / "my_extensions.py"
    path.write_text("\n\n".join(blocks), encoding="utf-8")
    return path


def play_with(rank: int, plugin: str, case: Case) -> Played:
    """A case on one rank that has imported the plugin."""
    import_plugins([plugin])
    return play(rank, case)


def further_losses(rank: int, plugin: str, case: Case) -> list[float]:
    """The registered term of three steps, as the step reports it."""
    from frontier_llm.train.step import train_step
    from tests.parity.play import build

    import_plugins([plugin])
    state = build(rank, case)
    return [train_step(state).further_losses["small-activations"] for _ in range(STEPS)]


@pytest.mark.parametrize("family", ["gpt", "llama"], ids=["tied", "untied"])
def test_a_schedule_with_another_placement_trains_as_the_oracle(ranks: RankPool, extensions: Path, family: str) -> None:
    case = Case(family, pp=2, dp=2, schedule="v-gpipe", settings=("parallel.chunks=2",))
    ours = gather(ranks.run(case.world_size, play_with, str(extensions), case))
    assert differences(ours, witness(case.serial(), ours.initial)) == []


def test_an_optimizer_with_one_state_trains_as_the_oracle(ranks: RankPool, extensions: Path) -> None:
    case = Case("llama", tp=2, dp=2, settings=("optimizer.name=momentum",))
    ours = gather(ranks.run(case.world_size, play_with, str(extensions), case))
    assert differences(ours, witness(case, ours.initial, momentum(case.config().optimizer.betas[0]))) == []


def test_a_loss_term_is_the_same_on_every_layout_and_changes_the_gradient(ranks: RankPool, extensions: Path) -> None:
    weighted = ("train.loss_weights={small-activations: 0.5}",)
    serial = Case("llama", settings=weighted)
    plain = gather(ranks.run(1, play_with, str(extensions), serial.serial()))
    alone = gather(ranks.run(1, play_with, str(extensions), serial))
    assert differences(alone, plain) != []  # the term is heard
    terms = ranks.run(1, further_losses, str(extensions), serial)[0]
    for case in (Case("llama", pp=2, dp=2, settings=weighted), Case("llama", tp=2, pp=2, sequence_parallel=True, settings=weighted)):
        ours = gather(ranks.run(case.world_size, play_with, str(extensions), case))
        assert differences(ours, alone) == [], str(case)
        for reported in ranks.run(case.world_size, further_losses, str(extensions), case):
            assert reported == pytest.approx(terms, rel=TOLERANCE)


def refusal(rank: int, plugin: str, case: Case) -> str:
    """What a layout's check says; in another process, because what is registered stays."""
    import_plugins([plugin])
    with pytest.raises(LayoutError) as error:
        make_plan(case.config(), case.world_size)
    return str(error.value)


def test_names_that_nobody_registered_are_refused_with_the_nearest(ranks: RankPool, extensions: Path) -> None:
    case = Case("gpt", pp=2, schedule="v-gpip", settings=("parallel.chunks=2",))
    assert "v-gpipe" in ranks.run(1, refusal, str(extensions), case)[0]


def test_a_plugin_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py cannot be imported"):
        load_run("quickstart", [f"plugins=[{tmp_path / 'nowhere.py'}]"])


def test_a_loss_that_nobody_registered_is_refused_before_ranks_start(tmp_path: Path) -> None:
    config = load_run("train_small", ["train.loss_weights={small-activation: 0.1}", f"train.run_dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match="'small-activation' is not a loss that was registered"):
        check(config, 4)
