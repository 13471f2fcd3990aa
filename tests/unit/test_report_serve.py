"""The live page answers its reader and nobody else, and changes nothing."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from copus_ext.commands import status as tool
from copus_ext.monitor import page, serve, source
from copus_ext.monitor.serve import ReportServer, is_local, is_own_host, make_server, read_token
from megatron.training.common.control import LOCK_FILE, PAUSE_FILE
from megatron.training.logging.metrics import METRICS_FILE
from tests.helpers.written_runs import WrittenRun

TOKEN = "a token of some length"
Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    run = WrittenRun(tmp_path / "run")
    run.step(12)
    return run


@pytest.fixture(params=[None, TOKEN], ids=["open", "token"])
def server(run: WrittenRun, request: pytest.FixtureRequest) -> Iterator[ReportServer]:
    """One that listens on this machine."""
    with served(run.path, request.param) as made:
        yield made


@contextlib.contextmanager
def served(run: Path, token: str | None) -> Iterator[ReportServer]:
    """A server of a run, for as long as it is needed."""
    made = make_server(run, address="127.0.0.1", port=0, token=token)
    made.source._not_before = 0.0
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def ask(
    server: ReportServer, path: str, *, method: str = "GET", host: str = "localhost", **fields: str
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": host, **fields}.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def cookie_of(server: ReportServer) -> dict[str, str]:
    """What a reader sends once it was let in."""
    if server.token is None:
        return {}
    _, fields, _ = ask(server, f"/?token={TOKEN.replace(' ', '%20')}")
    return {"Cookie": fields["Set-Cookie"].split(";")[0]}


def test_a_reader_gets_the_page_and_what_was_written_since(
    server: ReportServer, run: WrittenRun
) -> None:
    known = cookie_of(server)
    status, fields, page = ask(server, "/", **known)
    assert status == 200 and b'src="plotly.js"' in page and len(page) < 1_000_000
    assert "default-src 'none'" in fields["Content-Security-Policy"]
    status, fields, data = ask(server, "/data.json", **known)
    shown = json.loads(data)
    assert (
        dict(shown["runs"][0]["facts"])["Steps"].startswith("12 of ")
        and shown["poll_s"] == source.POLL_S
    )
    again, more, nothing = ask(server, "/data.json", If_None_Match=fields["ETag"], **known)
    assert again == 304 and nothing == b""
    run.step(3)
    server.source._not_before = 0.0
    status, more, data = ask(server, "/data.json", If_None_Match=fields["ETag"], **known)
    assert status == 200 and more["ETag"] != fields["ETag"]
    assert dict(json.loads(data)["runs"][0]["facts"])["Steps"].startswith("15 of ")


def facts_of(server: ReportServer) -> dict[str, str]:
    """What the head of the page says now."""
    server.source._not_before = 0.0
    _, _, data = ask(server, "/data.json", **cookie_of(server))
    return dict(json.loads(data)["runs"][0]["facts"])


def test_a_page_says_when_its_run_falls_silent_or_is_asked_for_something(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.step(3)
    path = tmp_path / METRICS_FILE
    path.write_text(re.sub(r'"t":[0-9.]+', '"t":1.0', path.read_text()))
    (tmp_path / LOCK_FILE).parent.mkdir()
    (tmp_path / LOCK_FILE).touch()
    with served(tmp_path, None) as server:
        assert facts_of(server)["State"].startswith("training") and "Asked" not in facts_of(server)
        _, fields, _ = ask(server, "/data.json")
        (tmp_path / PAUSE_FILE).touch()
        assert "decide nothing" in facts_of(server)["Asked"]
        os.utime(tmp_path / LOCK_FILE, (1.0, 1.0))
        assert facts_of(server)["State"].startswith("lost: no sign of life")
        assert ask(server, "/data.json", If_None_Match=fields["ETag"])[0] == 200


def test_there_are_no_other_files(server: ReportServer) -> None:
    known = cookie_of(server)
    for path in ("/metrics.jsonl", "/../run/metrics.jsonl", "/%2e%2e/", "/run/", "/data.json/"):
        status, _, body = ask(server, path, **known)
        assert status == 404 and b'"kind"' not in body


def test_nothing_can_be_written(server: ReportServer) -> None:
    known = cookie_of(server)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "XYZ"):
        status, fields, body = ask(server, "/", method=method, **known)
        assert (status, fields["Allow"], body) == (405, "GET, HEAD", b"")


def test_a_head_has_no_body(server: ReportServer) -> None:
    status, fields, body = ask(server, "/", method="HEAD", **cookie_of(server))
    assert status == 200 and int(fields["Content-Length"]) > 1000 and body == b""


def test_a_name_that_others_may_point_here_is_refused(server: ReportServer) -> None:
    known = cookie_of(server)
    for host in ("evil.example", "", "localhost.evil.example", "10.0.0.1", "[::"):
        status, _, body = ask(server, "/data.json", host=host, **known)
        assert status in (400, 421) and b"runs" not in body


def test_without_the_token_there_is_nothing(server: ReportServer) -> None:
    if server.token is None:
        return
    wrong = f"{server.cookie}=wrong"
    attempts = [{}, {"Cookie": wrong}, {"Cookie": "\x80\xff;;="}, {"Cookie": f"copus_1={TOKEN}"}]
    for path in ("/", "/data.json", "/plotly.js", "/?token=", "/?token=wrong", "/?token=%ff"):
        for fields in attempts:
            status, sent, body = ask(server, path, **fields)
            assert status == 403 and "Set-Cookie" not in sent and b"runs" not in body
    status, fields, body = ask(server, f"/?token={TOKEN.replace(' ', '+')}")
    assert status == 200 and TOKEN.encode() not in body and TOKEN not in str(fields)
    assert "HttpOnly" in fields["Set-Cookie"] and "SameSite=Strict" in fields["Set-Cookie"]


def test_a_page_is_made_once_for_all_its_readers(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(source, "render", lambda *a, **k: made.append(1) or page.render(*a, **k))
    with served(run.path, None) as server:
        bodies = {ask(server, "/", Accept_Encoding="gzip")[2] for _ in range(3)}
        assert len(bodies) == 1 and len(made) == 1
        run.step(3)
        server.source._not_before = 0.0
        for _ in range(3):
            assert b'"15 of 1,000 (1.5 %)"' in ask(server, "/")[2]
        assert len(made) == 2


def test_who_only_holds_connections_does_not_keep_others_out(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "MOST_READERS", 4)
    with served(run.path, None) as server, contextlib.ExitStack() as stack:
        at = ("127.0.0.1", server.server_address[1])
        for _ in range(3 * serve.MOST_READERS):
            idle = stack.enter_context(socket.create_connection(at, timeout=20))
            idle.sendall(b"GET / HT")
        assert ask(server, "/data.json")[0] == 200
        handlers = [t for t in threading.enumerate() if "process_request" in t.name]
        assert len(handlers) <= serve.MOST_READERS


def test_a_request_that_comes_drop_by_drop_is_cut_off(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "REQUEST_S", 0.3)
    with served(run.path, None) as server:
        at = ("127.0.0.1", server.server_address[1])
        with socket.create_connection(at, timeout=0.05) as slow:
            for _ in range(400):  # 20 s and more
                try:
                    slow.sendall(b"G")
                    if slow.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            else:
                pytest.fail("nobody has cut it off")


def test_a_page_that_takes_long_to_make_is_waited_for(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "ANSWER_S", 0.3)
    with served(run.path, None) as server:
        make = server.source.page

        def slowly() -> Any:
            time.sleep(1.5)  # three looks at what takes too long
            return make()

        monkeypatch.setattr(server.source, "page", slowly)
        assert ask(server, "/")[0] == 200


@pytest.mark.parametrize("address", ["0.0.0.0", "", "::", "192.0.2.1", "some.host", "127.0.0.1.x"])
def test_other_addresses_need_a_token(run: WrittenRun, address: str) -> None:
    with pytest.raises(ValueError, match="--token"):
        make_server(run.path, address=address, port=0, token=None)
    for token in ("", "short"):
        with pytest.raises(ValueError, match="--token"):
            make_server(run.path, address=address, port=0, token=token)


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        make_server(tmp_path / "nowhere", address="127.0.0.1", port=0, token=None)


def test_which_names_are_of_this_machine() -> None:
    assert all(map(is_local, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert is_own_host("[::1]:80", local_only=True) and is_own_host("localhost:1", local_only=True)
    assert is_own_host("10.1.2.3:8000", local_only=False)
    assert not is_own_host("evil.example", local_only=False)
    assert not is_own_host(None, local_only=False)


def test_the_command_serves_with_a_token_of_its_own_until_it_is_interrupted(
    run: WrittenRun,
) -> None:
    command = [sys.executable, "tools/status.py", str(run.path), "--serve", "--port", "0"]
    command.append("--token")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that a shell runs in the background ignore SIGINT, and so would their children.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as p:
        assert p.stdout is not None and p.stderr is not None
        link = urlsplit(p.stdout.readline().split()[0])
        connection = http.client.HTTPConnection("127.0.0.1", link.port or 0, timeout=60)
        fields: dict[str, str] = {}
        for path, status in (("/data.json", 403), (f"/?{link.query}", 200), ("/data.json", 200)):
            connection.request("GET", path, headers=fields)
            answer = connection.getresponse()
            assert (answer.status, path) == (status, path)
            body = answer.read()
            fields = {"Cookie": answer.getheader("Set-Cookie", "").split(";")[0]}
        assert json.loads(body)["runs"][0]["name"] == "run"
        p.send_signal(signal.SIGINT)
        assert p.wait(60) == 0 and p.stderr.read() == ""


def test_a_token_file_is_for_its_owner_alone(
    run: WrittenRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\nmore\n")
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    file.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        read_token(file)
    flags = [str(run.path), "--serve", "--token-file"]
    assert tool.main([*flags, str(tmp_path / "none")]) == 5
    assert "--token-file" in capsys.readouterr().err
    file.write_text("short")
    file.chmod(0o600)
    for more in ([], ["--token"]):
        with pytest.raises(SystemExit) as error:
            tool.main([*flags, str(file), *more])
        assert error.value.code == 2 and "--token-file" in capsys.readouterr().err
