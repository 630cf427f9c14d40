"""The dashboard over HTTP: a real server on loopback, its live events, its door."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from everfed.errors import UserError
from everfed.reports import dashboard
from everfed.reports.server import check_token, create_app, is_loopback, serve
from tests.reports.folders import create, evaluation, finished, log, phase, start
from tests.reports.serving import events, get, served, until
from tests.support.waiting import HANG

pytest.importorskip("fastapi", reason="the dashboard needs everfed[ui]")


def names(port: int) -> list[str]:
    return [run["id"] for run in json.loads(get(port, "/api/runs")[2])["runs"]]


def test_the_page_and_its_files_come_from_here(tmp_path: Path) -> None:
    with served(tmp_path) as port:
        status, headers, body = get(port, "/")
        assert status == 200 and headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in headers["content-security-policy"]
        page = body.decode()
        assert "://" not in page
        files = re.findall(r'(?:src|href)="(/[^"]*)"', page)
        assert len(files) == 5
        for file in files:
            status, headers, body = get(port, file)
            assert status == 200 and headers["x-content-type-options"] == "nosniff" and b"://" not in body


def test_runs_appear_move_and_go_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "QUIET_AFTER", HANG)  # seconds by the clock of this machine
    with served(tmp_path) as port:
        stream = events(port)
        assert next(stream) == {"runs": [], "gone": [], "problems": [], "notes": {}}
        folder = create(tmp_path / "a")
        assert next(stream)["runs"][0]["status"] == "waiting"
        # a look may fall between two lines, hence the waiting
        log(folder, [start(), phase(0)])
        seen = until(lambda: latest(stream, done=1))
        assert (seen["id"], seen["status"], seen["rounds"]) == ("a", "running", 6)
        log(folder, [phase(1, trained=2), evaluation(1, 0, [0.5])])
        assert until(lambda: latest(stream, done=2, acc=0.5))["skipped"] == 2
        shutil.rmtree(folder.path)
        assert until(lambda: next(stream)["gone"]) == ["a"]
        stream.close()


def latest(stream: Iterator[dict[str, Any]], **expected: Any) -> dict[str, Any] | None:
    """The next news of a run, if it is as expected."""
    run = next(stream)["runs"][0]
    return run if expected.items() <= run.items() else None


def test_a_second_listener_gets_everything_first(tmp_path: Path) -> None:
    finished(tmp_path / "a")
    finished(tmp_path / "b", "der")
    with served(tmp_path) as port:
        until(lambda: len(names(port)) == 2)
        first, second = events(port), events(port)
        assert {run["id"] for run in next(first)["runs"]} == {run["id"] for run in next(second)["runs"]} == {"a", "b"}
        first.close(), second.close()


def test_comparison_run_and_report(tmp_path: Path) -> None:
    finished(tmp_path / "deep" / "a b", "fedavg")
    finished(tmp_path / "c", "der")
    with served(tmp_path) as port:
        until(lambda: len(names(port)) == 2)
        asked = f"run={quote('deep/a b')}&run=c"
        status, _, body = get(port, f"/api/compare?{asked}&what=acc_t")
        assert status == 200 and body.count(b"<polyline") == 2
        status, _, body = get(port, "/api/compare?run=c&what=loss&first=3&last=5")
        assert status == 200 and b'data-frame="3 5 ' in body
        status, _, body = get(port, "/api/run?id=c")
        assert status == 200 and "Who saw what when" in json.loads(body)["sections"]["who"]
        status, headers, body = get(port, f"/api/report?{asked}")
        assert status == 200 and 'filename="everfed-report.html"' in headers["content-disposition"]
        assert body.startswith(b"<!doctype html>") and b"://" not in body


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/compare?run=a&what=nonsense", 422),
        ("/api/compare?run=a&by=nonsense", 422),
        ("/api/compare?run=a&x=nonsense", 422),
        ("/api/compare?run=a&smooth=1", 422),
        ("/api/compare", 422),
        ("/api/compare?run=a&first=x", 422),
        ("/api/compare?run=nobody", 404),
        ("/api/run?id=nobody", 404),
        ("/api/report?" + "&".join(f"run={i}" for i in range(101)), 422),
        ("/docs", 404),
        ("/openapi.json", 404),
    ],
)
def test_what_cannot_be_answered_is_an_error(tmp_path: Path, path: str, status: int) -> None:
    finished(tmp_path / "a")
    with served(tmp_path) as port:
        until(lambda: names(port))
        found, _, body = get(port, path)
        assert found == status and json.loads(body)["detail"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_there_is_nothing_to_change(tmp_path: Path, method: str) -> None:
    finished(tmp_path / "a")
    with served(tmp_path) as port:
        for path in ("/", "/api/runs", "/api/run?id=a", "/api/report?run=a"):
            assert get(port, path, method)[0] == 405


JSON = {"Content-Type": "application/json"}


def post(port: int, path: str, body: Any, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.request("POST", path, json.dumps(body), headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_runs_are_named_tagged_and_hidden_in_a_file_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "HEARTBEAT", HANG)  # open pages are sent a note, and not by the next heartbeat
    finished(tmp_path / "deep" / "a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "deep").rglob("*")}
    with served(tmp_path) as port:
        until(lambda: names(port))
        stream = events(port)
        assert next(stream)["notes"] == {}
        note = {"name": " the best ", "tags": ["good"], "hidden": True}
        assert post(port, "/api/note?id=deep/a", note, **JSON) == 200
        kept = {"deep/a": {"name": "the best", "tags": ["good"], "hidden": True}}
        assert json.loads((tmp_path / "dashboard.json").read_text()) == kept
        assert json.loads(get(port, "/api/runs")[2])["notes"] == kept, "at once, not with the next poll"
        until(lambda: next(stream)["notes"] == kept)
        stream.close()
        assert post(port, "/api/note?id=deep/a", {}, **JSON) == 200
        assert json.loads((tmp_path / "dashboard.json").read_text()) == {}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "deep").rglob("*")} == before


def test_notes_come_from_the_own_page_about_known_runs_only(tmp_path: Path) -> None:
    finished(tmp_path / "a")
    with served(tmp_path) as port:
        until(lambda: names(port))
        own = f"http://127.0.0.1:{port}"
        assert post(port, "/api/note?id=a", {"name": "x"}, **{"Content-Type": "text/plain"}) in (403, 422)
        assert post(port, "/api/note?id=a", {"name": "x"}, **JSON, Origin="http://elsewhere.example") == 403
        assert post(port, "/api/note?id=../a", {"name": "x"}, **JSON, Origin=own) == 404
        assert post(port, "/api/note?id=a", {"name": "x" * 121}, **JSON, Origin=own) == 422
        assert post(port, "/api/note?id=a", {"colour": "red"}, **JSON, Origin=own) == 422
        assert not (tmp_path / "dashboard.json").exists()
        assert post(port, "/api/note?id=a", {"name": "x"}, **JSON, Origin=own) == 200


def test_a_damaged_file_of_notes_is_named_and_harms_nothing(tmp_path: Path) -> None:
    finished(tmp_path / "a")
    (tmp_path / "dashboard.json").write_text('{"a": {"name": 3}}')
    with served(tmp_path) as port:
        found = until(lambda: json.loads(get(port, "/api/runs")[2])["problems"])
        assert names(port) == ["a"] and found[0].startswith("dashboard.json cannot be read")
        assert post(port, "/api/note?id=a", {"name": "best"}, **JSON) == 422
        assert (tmp_path / "dashboard.json").read_text() == '{"a": {"name": 3}}', "it may hold notes on other runs"


def test_the_options_in_which_runs_differ(tmp_path: Path) -> None:
    for size in (100, 200):
        finished(tmp_path / str(size), "der", parts={"memory": {"size": size}})
    with served(tmp_path) as port:
        until(lambda: len(names(port)) == 2)
        assert json.loads(get(port, "/api/options")[2]) == {"memory.size": {"100": 100, "200": 200}}


TRAVERSALS = [
    "../secret",
    "..%2Fsecret",
    "..%252Fsecret",
    "%2e%2e/secret",
    "....//secret",
    "..\\secret",
    "a/../../secret",
]


def test_no_path_leads_out_of_the_folder(tmp_path: Path) -> None:
    finished(tmp_path / "secret", "hidden-method")
    finished(tmp_path / "runs" / "a")
    with served(tmp_path / "runs") as port:
        until(lambda: names(port))
        tried = [*TRAVERSALS, quote(str(tmp_path / "secret"), safe=""), "%2Fetc%2Fpasswd", "a%00", "file:///etc/passwd"]
        for name in tried:
            for path in (f"/api/run?id={name}", f"/api/report?run={name}", f"/api/compare?run={name}"):
                status, _, body = get(port, path)
                assert status == 404 and b"hidden-method" not in body and b"root:" not in body
            for path in (f"/static/{name}", f"/{name}", f"/static/{name}/recipe.toml"):
                status, _, body = get(port, path)
                assert status == 404 and b"hidden-method" not in body and b"root:" not in body


def test_with_a_token_nothing_is_shown_without_it(tmp_path: Path) -> None:
    finished(tmp_path / "a")
    with served(tmp_path, "s3cret; ü") as port:
        for path in ("/api/runs", "/api/live", "/api/report?run=a", "/static/page.css", "/nowhere"):
            assert get(port, path)[0] == 401
            assert get(port, path, Authorization="Bearer wrong")[0] == 401
            assert get(port, path, Cookie="everfed-token=zz")[0] == 401
        status, _, body = get(port, "/")
        assert status == 401 and b"<form>" in body
        assert get(port, "/?token=wrong")[0] == 401
        # a token in the address opens the page, not the data, so that it does not stay in addresses
        assert get(port, f"/api/runs?token={quote('s3cret; ü')}")[0] == 401
        status, headers, _ = get(port, f"/?token={quote('s3cret; ü')}")
        assert status == 303 and headers["location"] == "/"
        assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
        cookie = headers["set-cookie"].partition(";")[0]
        assert get(port, "/api/runs", Cookie=cookie)[0] == 200
        assert get(port, "/", Cookie=cookie)[0] == 200
        assert next(events(port, Cookie=cookie))["problems"] == []


def test_a_bearer_token_opens_everything(tmp_path: Path) -> None:
    with served(tmp_path, "plain") as port:
        assert get(port, "/api/runs", Authorization="Bearer plain")[0] == 200
        # any name will do with a token: other machines call this one as they like
        assert get(port, "/api/runs", Authorization="Bearer plain", Host="lab.example:80")[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", ""])
def test_without_a_token_other_names_of_this_machine_are_refused(tmp_path: Path, host: str) -> None:
    with served(tmp_path) as port:
        assert get(port, "/api/runs", Host=host)[0] == 403
        for local in ("localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:8765"):
            assert get(port, "/api/runs", Host=local)[0] == 200


def test_a_token_is_needed_beyond_loopback(tmp_path: Path) -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("127.8.9.1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("::") and not is_loopback("192.168.1.5")
    with pytest.raises(UserError, match=r"--host 0\.0\.0\.0 lets other machines read these runs: set --token"):
        serve(tmp_path, "0.0.0.0", 0, None, lambda address: None)
    with pytest.raises(UserError, match="--token is empty"):
        check_token("127.0.0.1", " ")
    check_token("0.0.0.0", "secret")


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        create_app(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is not a folder"):
        create_app(tmp_path / "file")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1, port {port}.*try --port 0"):
            serve(tmp_path, "127.0.0.1", port, None, lambda address: None)


def test_without_fastapi_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(UserError, match=r"pip install 'everfed\[ui\]'"):
        create_app(tmp_path)


def test_damaged_and_outside_runs_are_reported(tmp_path: Path) -> None:
    finished(tmp_path / "outside")
    folder = finished(tmp_path / "runs" / "a")
    folder.result.write_text("{")
    os.symlink(tmp_path / "outside", tmp_path / "runs" / "link")
    with served(tmp_path / "runs") as port:
        until(lambda: names(port))
        found = json.loads(get(port, "/api/runs")[2])
        assert found["runs"][0]["status"] == "unreadable" and "link is a link" in found["problems"][0]
        status, _, body = get(port, "/api/report?run=a")
        assert status == 422 and "is not valid JSON" in json.loads(body)["detail"]
        assert "This run cannot be read" in json.loads(get(port, "/api/run?id=a")[2])["sections"]["problem"]


COMMAND = f"""
import typer
from everfed.commands.ui import ui
from everfed.reports import server

server.GRACE = {HANG}
app = typer.Typer()
app.command()(ui)
app()
"""


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    """With a page open, ctrl-C ends it cleanly and at once. Other users of this machine, who reach loopback, too, see
    nothing without the address that is printed."""
    finished(tmp_path / "a")
    words = [sys.executable, "-c", COMMAND, str(tmp_path), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port, token = re.fullmatch(r"dashboard: http://127\.0\.0\.1:(\d+)/\?token=(\S{32}) \(ctrl-C.*\n", line).groups()
        assert get(int(port), "/api/runs")[0] == 401
        stream = events(int(port), Authorization=f"Bearer {token}")
        until(lambda: next(stream)["runs"])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.wait()
