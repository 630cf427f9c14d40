"""`everfed submit`: a script of identical workers, checked before it is written, and locks that workers rely on."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from everfed.cli import app
from everfed.experiments import submit
from everfed.store.files import locked
from everfed.store.shared_disk import _TRY, lock_report

COMMAND = ["compare", "demo", "--methods", "fedavg,er", "--seeds", "0,1"]


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["submit", *words])


def test_slurm_gets_an_array_of_workers_that_start_where_the_command_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("slurm", "--workers", "8", "--", *COMMAND, "--out", "my table")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "my table/submit/slurm.sbatch").read_text()
    assert "#SBATCH --array=1-8\n" in text and "--job-name=everfed-my-table" in text and "--requeue" in text
    assert text.splitlines()[-2:] == [
        f"cd {tmp_path}",
        f"exec {submit.sys.executable} -m everfed compare demo --methods fedavg,er --seeds 0,1 --out 'my table'",
    ]
    assert subprocess.run(["bash", "-n", tmp_path / "my table/submit/slurm.sbatch"], check=False).returncode == 0


def test_kubernetes_gets_a_job_whose_words_are_kept_apart(tmp_path: Path) -> None:
    assert call("kubernetes", "--workers", "3", "--", *COMMAND, "--out", str(tmp_path / "a b")).exit_code == 0
    job = yaml.safe_load((tmp_path / "a b/submit/kubernetes.yaml").read_text())
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    [worker] = job["spec"]["template"]["spec"]["containers"]
    assert worker["command"] == ["everfed", *COMMAND, "--out", str(tmp_path / "a b")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "demo"], "one of compare, sweep, reproduce, leaderboard, not 'run'"),
        ([], "and there is none"),
        ([*COMMAND, "--out", "x", "--jbos", "1"], "No such option '--jbos'"),
        (COMMAND, "compare needs --out DIR"),
    ],
)
def test_a_command_that_would_fail_on_every_worker_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("slurm", "--", *words)
    assert result.exit_code == 2 and said in result.output
    assert not list(tmp_path.iterdir())


def test_a_sites_own_template_is_filled_in(tmp_path: Path) -> None:
    own = tmp_path / "site.sbatch"
    own.write_text("#SBATCH --partition=a100 --array=1-@WORKERS@\n@COMMAND@\n")
    words = ("--", *COMMAND, "--out", str(tmp_path / "table"))
    assert call("slurm", "--workers", "2", "--template", str(own), *words).exit_code == 0
    first, _ = (tmp_path / "table/submit/slurm.sbatch").read_text().splitlines()
    assert first == "#SBATCH --partition=a100 --array=1-2"
    own.write_text("@ACCOUNT@")
    result = call("slurm", "--template", str(own), *words)
    assert result.exit_code == 2 and "@ACCOUNT@" in result.output and "@WORKERS@" in result.output


def test_the_shipped_template_can_be_printed_and_used_again(tmp_path: Path) -> None:
    shown = call("local", "--show-template").output
    assert shown == submit.template_of("local")


def test_now_hands_the_script_to_the_program_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("slurm", "--now", "--", *COMMAND, "--out", str(tmp_path / "table"))
    result = call(*words)
    assert result.exit_code == 2 and "sbatch is not installed here" in result.output
    program = tmp_path / "sbatch"
    program.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/got\nexit 7\n')
    program.chmod(0o755)
    assert call(*words).exit_code == 7
    assert (tmp_path / "got").read_text().strip() == str(tmp_path / "table/submit/slurm.sbatch")


def test_workers_on_this_machine_all_run_and_the_worst_exit_code_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for everfed that counts its starts; the second one fails."""
    stand_in = tmp_path / "everfed"
    stand_in.write_text(f"#!/bin/sh\nmkdir {tmp_path}/first 2>/dev/null && exit 0\nmkdir {tmp_path}/second\nexit 3\n")
    stand_in.chmod(0o755)
    local = submit.System("local.sh", ("bash",), (str(stand_in),))
    monkeypatch.setitem(submit.SYSTEMS, "local", local)
    assert call("local", "--workers", "2", "--now", "--", *COMMAND, "--out", str(tmp_path / "table")).exit_code == 3
    assert (tmp_path / "second").is_dir()
    assert len(list((tmp_path / "table/submit").glob("worker-*.out"))) == 2


@pytest.mark.slow
def test_two_real_workers_fill_one_table(tmp_path: Path) -> None:
    words = ["compare", "demo", "--methods", "fedavg,er", "--seeds", "0,1", "--scale", "0.1", "--jobs", "1"]
    result = call("local", "--workers", "2", "--now", "--", *words, "--out", str(tmp_path / "table"))
    assert result.exit_code == 0, result.output
    table = json.loads((tmp_path / "table/compare.json").read_text())
    assert {row["name"] for row in table["rows"]} == {"fedavg", "er"}
    started = [path.read_text().count('"event": "start"') for path in (tmp_path / "table").glob("*/events.jsonl")]
    assert started == [1, 1, 1, 1]


# locks ----------------------------------------------------------------------------------------------------------------
NFS = "server:/home {} nfs4 rw,vers=4.2{} 0 0\n"


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        ("/dev/sda1 / ext4 rw 0 0\n", "yes, between processes; ext4 is a file system of this machine alone"),
        ("/dev/sda1 / ext4 rw 0 0\n" + NFS.format("{}", ""), "nfs4 is mounted so that they hold between nodes"),
        (NFS.format("{}", ",local_lock=all"), "of this node only: nfs4 is mounted with local_lock=all"),
        ("x:/y {} lustre rw,localflock 0 0\n", "lustre is mounted with localflock; ask for the mount option flock"),
        ("x:/y {} lustre rw 0 0\n", "lustre is mounted without flock"),
        ("x:/y {} lustre rw,flock 0 0\n", "lustre is mounted so that they hold between nodes"),
        ("", "the file system is not known"),
    ],
)
def test_what_a_file_system_promises_about_locks(tmp_path: Path, mounts: str, said: str) -> None:
    assert said in lock_report(tmp_path, mounts.replace("{}", str(tmp_path.resolve())))
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_locks_do_not_hold_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where locks are granted to everybody: the second process is one that takes none."""
    monkeypatch.setattr("everfed.store.shared_disk._TRY", "pass")
    assert lock_report(tmp_path).startswith("no: a second process gets a lock")


def test_doctor_reports_a_folder_and_refuses_one_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path), "--json"])
    assert json.loads(result.output)[f"locks in {tmp_path}"] == lock_report(tmp_path)
    assert CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path / "no")]).exit_code == 2


def test_the_report_tries_the_lock_that_runs_take(tmp_path: Path) -> None:
    with locked(tmp_path / "a"):
        other = [submit.sys.executable, "-c", _TRY, str(tmp_path / "a")]
        assert subprocess.run(other, capture_output=True, check=False).returncode != 0
