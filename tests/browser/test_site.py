"""The documentation as it is built, in a real browser: typeset equations, and nothing that runs out of the page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
PAGES = ("index", "installation", "clusters", "metrics", "protocol", "methods/fedgp", "methods/ewc", "methods/matching")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'everfed[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.slow)])
def test_pages_fit_and_equations_are_typeset(site: Path, watch: Callable[..., Any], width: int) -> None:
    one = watch("file://", viewport={"width": width, "height": 844})
    for name in PAGES:
        one.page.goto((site / f"{name}.html").as_uri())
        formulas = one.page.locator(".arithmatex").count()
        assert one.page.locator(".arithmatex .katex").count() >= formulas, name
        assert one.page.locator(".katex-error").count() == 0, name
        assert one.overflow() <= 0, name
        assert one.page.evaluate(RUNNING_OUT) == [], name
    assert formulas >= 3  # of the last page


RUNNING_OUT = """[...document.querySelectorAll('.md-typeset pre')]
  .filter((block) => block.scrollWidth > block.clientWidth + 1).map((block) => block.textContent.slice(0, 60))"""
