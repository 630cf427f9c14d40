"""Takes the pictures of README.md and the documentation again: python docs/pictures.py [RUNS].

RUNS: a folder of runs of the demo; without it they are run first, which takes some minutes. Needs chromium (or
EVERFED_CHROMIUM), playwright and pillow. `docs/images/round.svg` is drawn by hand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
COLOURS = 128  # that a picture is reduced to, for the sake of its size
DEMO = ("compare", "demo", "--methods", "fedavg,der,fedgp+der", "--seeds", "0,1", "--set", "eval.every=2")


def run_demo(folder: Path) -> Path:
    """The runs of `everfed demo`, scored every second round."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "everfed", *DEMO, "--out", str(folder)], env=environment, check=True)
    return folder


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The dashboard of the runs; gives its address."""
    import uvicorn

    from everfed.reports.server import create_app

    app = create_app(runs, every=0.2)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    app.state.feed.closed = server.should_exit = True
    thread.join(20)


def smaller(path: Path, width: int) -> None:
    """Scale the picture to `width` and reduce its colours."""
    from PIL import Image

    picture = Image.open(path).convert("RGB")
    height = round(picture.height * width / picture.width)
    scaled = picture.resize((width, height), Image.Resampling.LANCZOS)
    # maximum coverage keeps thin coloured lines apart
    scaled.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def take(browser: Any, runs: Path, report: Path) -> None:
    page = browser.new_context(viewport={"width": 1280, "height": 900}, device_scale_factor=1.5).new_page()
    page.goto(report.as_uri())
    page.screenshot(path=IMAGES / "report.png")
    figure = page.locator("[data-figure=acc]")
    figure.scroll_into_view_if_needed()
    box = figure.bounding_box()
    room = {"x": box["x"] - 10, "y": box["y"] - 6, "width": box["width"] + 24, "height": box["height"] + 12}
    page.screenshot(path=IMAGES / "result.png", clip=room)
    with served(runs) as address:
        page.goto(address)
        page.locator("#chart polyline").first.wait_for()
        page.wait_for_timeout(2000)
        page.evaluate("document.getElementById('root').textContent = 'runs/rotated-digits'")
        page.screenshot(path=IMAGES / "dashboard.png")
        page.context.close()


def main(runs: Path | None) -> None:
    sys.path.insert(0, str(ROOT))
    from playwright.sync_api import sync_playwright

    from everfed import report

    found = os.environ.get("EVERFED_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        runs = runs or run_demo(Path(folder) / "rotated-digits")
        written = report([runs], Path(folder) / "report.html", figures=False, title="Rotated digits")
        browser = playwright.chromium.launch(executable_path=found, args=["--headless", "--no-sandbox"])
        take(browser, runs, written)
        browser.close()
    for name, width in (("report", 900), ("dashboard", 900), ("result", 640)):
        smaller(IMAGES / f"{name}.png", width)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None)
