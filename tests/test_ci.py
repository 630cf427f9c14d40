"""What a change must pass runs everywhere: programs that are missing are installed, or their absence is reported."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci/run"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs a checkout: .ci/run is not part of a package")


def run(folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """The script in a tree of its own, where only these programs (text of shell scripts) and a few tools exist."""
    path = folder / "bin"
    path.mkdir()
    (folder / "tree/.ci").mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "tree/.ci/run")
    for tool in ("bash", "dirname", "timeout", "cat"):
        (path / tool).symlink_to(str(shutil.which(tool)))
    for name, text in {"make": 'echo "make $*"', **programs}.items():
        (path / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (path / name).chmod(0o755)
    command = [str(path / "bash"), str(folder / "tree/.ci/run")]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True)


def test_what_is_there_is_not_installed(tmp_path: Path) -> None:
    done = run(tmp_path, nginx="", chromium="", **{"apt-get": "exit 1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "make lint test\n", "")


def test_missing_programs_are_installed_and_said(tmp_path: Path) -> None:
    """apt-get knows no package before its first update."""
    calls = tmp_path / "calls"
    get = f'echo "${{@: -1}}" >> {calls}; [[ $* == *update* ]] && exit; [[ $(cat {calls}) == *update* ]]'
    done = run(tmp_path, **{"apt-get": get})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "installed nginx\ninstalled chromium\nmake lint test\n"
    assert calls.read_text().split() == ["nginx", "update", "nginx", "chromium"]


@pytest.mark.parametrize("programs", [{}, {"apt-get": "exit 100"}], ids=["no apt-get", "apt-get fails"])
def test_what_cannot_be_installed_is_said_and_the_tests_run(tmp_path: Path, programs: dict[str, str]) -> None:
    done = run(tmp_path, nginx="", **programs)
    assert (done.returncode, done.stdout) == (0, "make lint test\n")
    assert done.stderr == "chromium is not there and apt-get could not install it: tests that need it are skipped\n"
