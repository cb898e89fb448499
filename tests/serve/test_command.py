"""``foretoken serve`` as a process, and its options."""

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
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tiny
from byte_tokenizer import byte_tokenizer
from foretoken.cli.app import app
from foretoken.errors import ForetokenError
from serve_harness import process_runs, until

LONGEST = 240
ADDRESS = re.compile(r"(\S+) at http://([\d.]+):(\d+)/v1")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny-target"
    tiny.tiny_llama(vocab_size=259, seed=1, eos_token_id=258, max_position_embeddings=4096).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@contextmanager
def process(target: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """A server as a process; with its port and the served model's name."""
    command = [sys.executable, "-m", "foretoken", "serve", "--target", target, "--port", "0", "--eager", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FORETOKEN_API_KEY": "from-environment"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
        try:
            assert running.stderr is not None
            said = []
            for line in running.stderr:
                said.append(line)
                if found := ADDRESS.search(line):
                    break
            else:
                pytest.fail("".join(said))
            yield running, int(found[3]), found[1]
        finally:
            if running.poll() is None:
                running.kill()


def test_sigterm_lets_a_stream_end_and_the_process_exits_with_0(target, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("from-file\n\n")
    with process(target, "--api-key-file", str(keys)) as (running, port, model):
        assert model == "tiny-target"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST)
        connection.request("GET", "/")
        assert b"page/app.js" in connection.getresponse().read()
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read().startswith(b'{"error"')
        body = {"prompt": "the cat", "ignore_eos": True, "stream": True, "speculation": {}}
        for key, length in (("from-file", 8), ("from-environment", 400)):
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
            connection.request("POST", "/v1/completions", json.dumps({**body, "max_tokens": length}), headers)
            response = connection.getresponse()
            assert response.status == 200
            if key == "from-file":
                response.read()
        response.readline()
        running.send_signal(signal.SIGTERM)
        *_, usage, done = [line for line in response.read().split(b"\n") if line]
        assert done == b"data: [DONE]"
        assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == 400
        until(lambda: refused(port))
        connection.close()
        _, said = running.communicate(timeout=LONGEST)
        assert running.returncode == 0, said
        assert "Traceback" not in said
        assert said.count("POST /v1/completions 200") == 2
        assert "the cat" not in said
        assert "from-" not in said


def refused(port: int) -> bool:
    """Whether nobody gets in any more."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


IN_A_CONTAINER = ["unshare", "--pid", "--fork", "--kill-child"]


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True).returncode != 0,
    reason="needs the right to make a namespace of processes",
)
def test_the_first_process_of_a_container_ends_on_sigterm_while_models_load():
    """The kernel keeps a signal without a handler from such a process."""
    loading = "import time; from foretoken.cli.serve import hear_sigterm; hear_sigterm(); print(0, flush=True); "
    command = [*IN_A_CONTAINER, sys.executable, "-c", f"{loading}time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline()
        first = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()[0]
        os.kill(int(first), signal.SIGTERM)
        assert running.wait(LONGEST) == 128 + signal.SIGTERM


def test_a_grace_time_ends_what_still_runs(target):
    with process(target, "--grace", "0", "--no-page") as (running, port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST)
        connection.request("GET", "/", headers={"x-api-key": "from-environment"})
        response = connection.getresponse()
        assert (response.status, b"there is no path" in response.read()) == (404, True)
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        headers = {"content-type": "application/json", "x-api-key": "from-environment"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        assert connection.getresponse().readline()
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=LONGEST)
        assert running.returncode == 0
        connection.close()


def engine_of(server: subprocess.Popen[str]) -> int:
    """The process that has a server's engine."""
    for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text():
            return int(pid)
    pytest.fail("the server has no process of an engine")


def begin_stream(port: int, tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST)
    body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    headers = {"content-type": "application/json", "x-api-key": "from-environment"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.readline()
    return connection, response


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up as Linux has them")


@needs_proc
def test_clients_are_told_when_the_engines_process_dies(target):
    with process(target, "--engine-process") as (running, port, _):
        connection, response = begin_stream(port, 4000)
        os.kill(engine_of(running), signal.SIGKILL)
        *_, error, done = [line for line in response.read().split(b"\n") if line]
        assert done == b"data: [DONE]"
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "generation_failed"
        connection.close()
        _, said = running.communicate(timeout=LONGEST)
        assert running.returncode == 1, said


@needs_proc
def test_ctrl_c_that_reaches_both_processes_lets_a_stream_end(target):
    with process(target, "--engine-process") as (running, port, _):
        connection, response = begin_stream(port, 400)
        engine = engine_of(running)
        for pid in (engine, running.pid):  # as a terminal does
            os.kill(pid, signal.SIGINT)
        os.kill(engine, signal.SIGTERM)
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        _, said = running.communicate(timeout=LONGEST)
        assert (running.returncode, "Traceback" in said) == (0, False), said
        until(lambda: not process_runs(engine))


@needs_proc
def test_the_engines_process_does_not_outlive_the_server(target):
    with process(target, "--engine-process") as (running, port, _):
        connection, _ = begin_stream(port, 4000)
        engine = engine_of(running)
        running.kill()
        until(lambda: not process_runs(engine))
        connection.close()


@pytest.mark.grid
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize("how", [(), ("--engine-process",)])
def test_a_chat_template_may_come_from_a_pipe(how, tmp_path, target):
    pipe = tmp_path / "template"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("piped: {{ messages[0].content }}",))
    writer.start()
    with process(target, "--chat-template", str(pipe), *how) as (_, port, _):
        writer.join(LONGEST)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST)
        body = {"messages": [{"role": "user", "content": "hello"}]}
        headers = {"content-type": "application/json", "x-api-key": "from-environment"}
        connection.request("POST", "/tokenize", json.dumps(body), headers)
        tokens = json.loads(connection.getresponse().read())["tokens"]
        connection.request("POST", "/detokenize", json.dumps({"tokens": tokens}), headers)
        assert json.loads(connection.getresponse().read())["prompt"] == "piped: hello"
        connection.close()


@pytest.mark.parametrize("how", [(), ("--engine-process",)])
def test_a_chat_template_that_is_no_file_is_told(how, target):
    options = ["--port", "0", "--eager", "--target", target, "--chat-template", "{{ messages }}" * 100]
    result = CliRunner().invoke(app, ["serve", *options, *how])
    assert result.exit_code == 2
    assert "can't be read" in result.output


@pytest.mark.parametrize("how", [(), ("--engine-process",)])
def test_a_model_that_cannot_be_loaded_is_told(how, tmp_path, target):
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--eager", "--target", str(broken), *how])
    assert result.exit_code == 2
    assert "its files are broken" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "no.such.host.invalid"], "can't listen"),
        (["--tls-key", "x"], "--tls-cert"),
        (["--tls-cert", os.devnull, "--tls-key", "/no/such/key"], "/no/such/key"),
        (["--tls-cert", os.devnull], os.devnull),
        (["--api-key", "a b\n"], "API key"),
        (["--api-key-file", "/nowhere"], "API keys"),
        (["--api-key-file", os.devnull], "no API key"),
        (["--cors-origin", ""], "origin"),
        (["--target", "/no/such/folder"], "/no/such/folder"),
        (["--drafter", "lokup"], "did you mean"),
        (["--port", "70000"], "65535"),
        (["--keep-alive", "inf"], "86400"),
    ],
)
def test_wrong_options_are_told_before_anything_is_loaded(options, said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("foretoken.cli.setup.load_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--eager", *options])
    assert result.exit_code == 2
    assert said in result.output


def test_nobody_can_connect_while_models_load(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = []

    def load(*_, **__):
        found.append(refused(port))
        raise ForetokenError("no more")

    monkeypatch.setattr("foretoken.cli.setup.load_engine", load)
    assert CliRunner().invoke(app, ["serve", "--port", str(port)]).exit_code == 2
    assert found == [True]


def test_an_empty_key_of_the_environment_is_told(monkeypatch):
    monkeypatch.setenv("FORETOKEN_API_KEY", "")
    monkeypatch.setattr("foretoken.cli.setup.load_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    result = CliRunner().invoke(app, ["serve", "--port", "0"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "FORETOKEN_API_KEY is set, and empty" in result.output


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(app, ["serve", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2
    assert "give a free port" in result.output


def test_missing_packages_are_told(monkeypatch):
    monkeypatch.setattr("foretoken.cli.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2
    assert "pip install '.[serve]' in your clone" in result.output
