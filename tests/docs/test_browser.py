"""The HTML that commands write, in a real browser: no console message, nothing fetched from elsewhere, nothing missing, not blank."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


def frontier_llm(*words: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "frontier_llm.cli.main", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def visit(page: Path, profile: Path) -> tuple[str, list[str]]:
    """(the document after its scripts ran, everything that the console or the network log said); page.png beside the page."""
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--window-size=1200,1600", "--hide-scrollbars",
            f"--screenshot={page.with_suffix('.png')}", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def not_blank(picture: Path) -> bool:
    image = pytest.importorskip("matplotlib.image").imread(picture)
    return float(image[..., :3].std()) > 0.02


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chromium")


def check(page: Path, profile: Path, *expected: str) -> None:
    document, messages = visit(page, profile)
    assert messages == []
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["']https?://""", text), "a page must work offline"
    for words in expected:
        assert words in document, words
    assert not_blank(page.with_suffix(".png"))


def test_report(tmp_path: Path, profile: Path) -> None:
    pytest.importorskip("matplotlib")
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: llama-tiny\nbatch: {global_batch: 4}\ndata: {train: synthetic, validation: synthetic}\n"
        f"train: {{run_dir: {tmp_path}/run, steps: 4, eval_samples: 4, device: cpu, tensorboard: false}}\n"
    )
    frontier_llm("train", run)
    frontier_llm("report", tmp_path / "run")
    check(tmp_path / "run" / "report.html", profile, "llama-tiny")


def test_plan(tmp_path: Path, profile: Path) -> None:
    pytest.importorskip("matplotlib")
    frontier_llm("plan", "gpt-22b", "--machine", "frontier", "--nodes", 16, "--figures", tmp_path / "plan")
    check(tmp_path / "plan" / "index.html", profile, "gpt-22b on 16 nodes of frontier")


def test_the_check_itself(tmp_path: Path, profile: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<!doctype html><title>x</title><script>console.error('broken'); nothing()</script><img src='missing.png'>")
    _, messages = visit(page, profile)
    assert any("broken" in line for line in messages)
    assert any("nothing is not defined" in line for line in messages)
    assert not not_blank(page.with_suffix(".png"))
