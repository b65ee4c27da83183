"""Opens the HTML pages that commands write in a real browser.

The page must cause no console message, fetch nothing from elsewhere, miss nothing and not be blank. It must fit a
phone's window, and be dark if the reader's colour scheme is dark.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


def frontier_llm(*words: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "frontier_llm.cli.main", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def visit(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """Return the document after its scripts ran, and all messages of the console and the network log. Writes page.png
    beside the page.
    """
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            "--window-size=1200,1600",
            "--hide-scrollbars",
            "--virtual-time-budget=8000",
            *flags,
            f"--screenshot={page.with_suffix('.png')}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


WIDTHS = (390, 800, 1400)  # a phone, half a screen, a screen
SCHEMES = {"dark": 0, "light": 1}
FRAMES = """<!doctype html><title>frames</title><script>
onmessage = (event) => document.body.append(` wider than ${event.data.width} by ${event.data.excess};`)
</script><body>"""
MEASURE = """<script>setTimeout(() => {
  parent.postMessage({ width: innerWidth, excess: document.documentElement.scrollWidth - innerWidth }, "*")
}, 1500)</script></body>"""


def look(page: Path, profile: Path, scheme: str) -> str:
    """Return the widths that the page reports in frames of each width. Writes a picture of the frames beside the
    page.
    """
    measured = page.with_name("measured.html")
    frames = page.with_name(f"{page.stem}-{scheme}.html")
    text = page.read_text(encoding="utf-8")
    measured.write_text(MEASURE.join(text.rsplit("</body>", 1)), encoding="utf-8")
    frames.write_text(
        FRAMES + "".join(f'<iframe src="measured.html" width={width} height=2600></iframe>' for width in WIDTHS)
    )
    document, messages = visit(
        frames, profile, "--window-size=2640,2700", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    )
    assert messages == []
    return document


def not_blank(picture: Path) -> bool:
    image = pytest.importorskip("matplotlib.image").imread(picture)
    return float(image[..., :3].std()) > 0.02


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chromium")


def check(page: Path, profile: Path, *expected: str) -> None:
    document, messages = visit(page, profile)
    assert messages == []
    # Plotly's text names its own site, and the browser resolves no name
    text = page.read_text(encoding="utf-8").split("<script>")[0]
    assert not re.search(r"""(src|href)=["']https?://""", text), "a page must work offline"
    for words in expected:
        assert words in document, words
    assert not_blank(page.with_suffix(".png"))
    assert document.count('<svg class="main-svg"') > 1, "Plotly drew nothing"
    brightness = {}
    for scheme in SCHEMES:
        widths = look(page, profile, scheme)
        assert all(f"wider than {width} by 0;" in widths for width in WIDTHS), widths[-200:]
        brightness[scheme] = float(
            pytest.importorskip("matplotlib.image").imread(page.with_name(f"{page.stem}-{scheme}.png"))[..., :3].mean()
        )
    assert brightness["dark"] < 0.4 < 0.7 < brightness["light"]


@pytest.mark.thorough
def test_report(tmp_path: Path, profile: Path) -> None:
    pytest.importorskip("plotly")
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: llama-tiny\nbatch: {global_batch: 4}\ndata: {train: synthetic, validation: synthetic}\n"
        f"train: {{run_dir: {tmp_path}/run, steps: 4, eval_interval: 2, eval_samples: 4, device: cpu, tensorboard: "
        f"false}}\n"
    )
    frontier_llm("train", run)
    frontier_llm("report", tmp_path / "run")
    check(tmp_path / "run" / "report.html", profile, "llama-tiny")


@pytest.mark.thorough
def test_plan(tmp_path: Path, profile: Path) -> None:
    pytest.importorskip("plotly")
    frontier_llm("plan", "gpt-22b", "--machine", "frontier", "--nodes", 16, "--figures", tmp_path / "plan.html")
    check(tmp_path / "plan.html", profile, "gpt-22b on 16 nodes of frontier")


@pytest.mark.thorough
def test_scaling(tmp_path: Path, profile: Path) -> None:
    pytest.importorskip("plotly")
    frontier_llm(
        "scaling",
        "weak",
        "--model",
        "gpt-175b",
        "--nodes",
        "16,32",
        "--site",
        "frontier",
        "-A",
        "x",
        "--simulate",
        "--output",
        tmp_path,
    )
    check(
        tmp_path / "simulated_weak_gpt-175b" / "scaling.html",
        profile,
        "Weak scaling: efficiency",
        "ORNL 175B (published)",
    )


def test_the_check_itself(tmp_path: Path, profile: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><title>x</title><script>console.error('broken'); nothing()</script><img src='missing.png'>"
    )
    _, messages = visit(page, profile)
    assert any("broken" in line for line in messages)
    assert any("nothing is not defined" in line for line in messages)
    assert not not_blank(page.with_suffix(".png"))
