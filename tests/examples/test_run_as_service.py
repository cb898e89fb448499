"""What runs a server as a service, and in a container: what it names is there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from foretoken.cli.app import app

ROOT = Path(__file__).parents[2]
UNIT, IMAGE = (ROOT / "examples" / "service" / name for name in ("foretoken.service", "Containerfile"))


def set_in(unit: str, name: str) -> str:
    return re.search(rf"^{name}=(.*)$", unit, re.MULTILINE)[1]


def options_of_serve() -> set[str]:
    command = get_command(app).commands["serve"]
    return {option for parameter in command.params for option in parameter.opts}


def instructions(name: str) -> list[str]:
    """Arguments of all instructions of a name in the Containerfile."""
    lines = IMAGE.read_text().replace("\\\n", " ").splitlines()
    return [line.removeprefix(name).strip() for line in lines if line.startswith(f"{name} ")]


def test_the_service_has_known_options_and_time_for_its_grace():
    unit = UNIT.read_text()
    _, command, *words = shlex.split(set_in(unit, "ExecStart"))
    assert command == "serve"
    assert {word for word in words if word.startswith("--")} <= options_of_serve()
    assert float(words[words.index("--grace") + 1]) < float(set_in(unit, "TimeoutStopSec"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_the_service(tmp_path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/foretoken/bin/foretoken", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_runs_a_command_with_known_options():
    (entry,) = instructions("ENTRYPOINT")
    command, serve, *words = re.findall(r'"([^"]*)"', entry)
    assert (command, serve) == ("foretoken", "serve")
    assert {word for word in words if word.startswith("--")} <= options_of_serve()
    port = words[words.index("--port") + 1]
    assert instructions("EXPOSE") == [port]
    assert f"127.0.0.1:{port}/ready" in IMAGE.read_text()


def test_the_image_is_made_of_files_that_a_wheel_can_be_built_of(tmp_path):
    extras = re.search(r"/source\[(.*?)\]", IMAGE.read_text())[1].split(",")
    assert set(extras) <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for copied in instructions("COPY"):
        *sources, to = copied.split()
        target = tmp_path / to.removeprefix("/").removeprefix("source").strip("/")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target)
            else:
                shutil.copy(ROOT / source, target)
    build = [sys.executable, "-m", "pip", "wheel", tmp_path, "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", tmp_path / "wheel"], check=True)
    assert len(list((tmp_path / "wheel").glob("foretoken-*.whl"))) == 1
