"""The command line as a process of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

COMMAND = [sys.executable, "-m", "foretoken"]


def environment(**more):
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return {**plain, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def test_help_is_quick_and_loads_no_torch():
    code = (
        "import sys; from foretoken.cli import main; sys.argv = ['foretoken', 'generate', '--help']\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'slow imports'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert "--num-speculative-tokens" in done.stdout


@pytest.mark.grid
@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]])
def test_help_in_a_terminal_of_few_characters(arguments):
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, env=environment(PYTHONIOENCODING="latin-1"), check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--help" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]])
def test_help_that_can_not_be_written(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, env=environment())
    assert done.returncode == 2
    assert done.stderr == b"error: the output can't be written: No space left on device\n"


def test_ctrl_c_leaves_the_text_so_far(models):
    process = subprocess.Popen(
        [*COMMAND, "generate", "hello", "--raw", "--target", models.native, "--drafter", "prompt-lookup", "--eager",
         "-n", "4000", "--ignore-eos", "--seed", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=180)
    assert process.returncode == 130
    assert (first + rest).endswith(b"\n")
    assert b"ended by interrupt" in errors
    assert b"Traceback" not in errors


def test_ctrl_c_is_not_lost_while_libraries_are_imported(models):
    """torch imports numpy while it is imported itself, and swallows what that raises."""
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'numpy.linalg':\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from foretoken.cli import main; main()"
    )
    arguments = ["generate", "hello", "--raw", "--target", models.native, "--drafter", "none", "--eager", "-n", "1"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, env=environment())
    assert (done.returncode, done.stdout) == (130, b""), done.stderr


def test_ctrl_c_between_questions_is_clean(models):
    process = subprocess.Popen(
        [*COMMAND, "chat", "--target", models.native, "--eager", "-n", "4", "--json"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith(b"{")
    # A signal that comes in the instant before a read begins to wait is seen after the read: then it takes another.
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
            break
    assert process.returncode == 130
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal_a_conversation_has_colours_and_a_prompt(models):
    controller, terminal = os.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", "--target", models.native, "--eager", "--drafter", "prompt-lookup", "-n", "20",
         "--seed", "1"],
        stdin=terminal, stdout=terminal, stderr=terminal, env=environment(TERM="xterm-256color"), close_fds=True,
    )  # fmt: skip
    os.close(terminal)
    shown = b""

    def wait_for(text):
        nonlocal shown
        deadline = time.monotonic() + 180
        while text not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([controller], [], [], 1)[0]:
                shown += os.read(controller, 65536)

    wait_for("loading …".encode())  # at once, for it takes a while
    wait_for(b"> ")
    os.write(controller, b"hello\n")
    wait_for(b"tokens/s")
    assert b"\x1b[32m" in shown or b"\x1b[33m" in shown
    os.write(controller, b"/quit\n")
    assert process.wait(timeout=180) == 0
    os.close(controller)


def test_errors_have_status_2_and_no_traceback():
    done = subprocess.run(
        [*COMMAND, "generate", "hello", "--target", "/no/such/folder"], capture_output=True, text=True,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "/no/such/folder" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_named():
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "verifiers"], stdout=full, stderr=subprocess.PIPE, env=environment())
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: the output can't be written: No space left")
    assert b"Traceback" not in done.stderr


@pytest.mark.grid
@pytest.mark.parametrize(
    "arguments",
    [
        ["verifiers"],
        ["--help"],
        ["serve", "--help"],
        ["generate", "hello", "-n", "9"],
        pytest.param(["bench", "peers"], marks=pytest.mark.full),
    ],
)
def test_a_reader_that_wants_no_more_is_no_error(arguments, models):
    if arguments[0] == "generate":
        arguments = [*arguments, "--target", models.native, "--eager", "--drafter", "prompt-lookup"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, env=environment())
    os.close(writer)
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr
    assert b"error" not in done.stderr.lower()


def test_with_a_closed_standard_error_notes_do_not_get_into_the_output():
    arguments = ["generate", "hello", "--target", "/no/such/folder"]
    done = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *COMMAND, *arguments], stdout=subprocess.PIPE, env=environment()
    )
    assert (done.returncode, done.stdout) == (2, b"")


def test_what_was_closed_is_open_to_nobody_in_processes_that_are_started():
    started = [
        sys.executable,
        "-c",
        "import os, sys; print(sys.stderr is not None, os.fstat(2) == os.stat(os.devnull))",
    ]
    code = "import subprocess, foretoken.cli as c; c.sys.argv = ['foretoken', '--version']\ntry: c.main()\n"
    code += f"except SystemExit: subprocess.run({started!r})"
    done = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment()
    )
    assert done.stdout.endswith(b"True True\n")


@pytest.mark.parametrize("arguments", [["generate", "-"], ["chat"]])
def test_a_closed_standard_input_is_named(arguments):
    code = (
        f"import sys; from foretoken.cli import main; sys.stdin = None; sys.argv = {['foretoken', *arguments]}; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment())
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: standard input is closed")


def test_nothing_slow_is_imported_before_ctrl_c_is_clean():
    code = "import sys; before = set(sys.modules); import foretoken.cli; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert not {"email", "shutil", "typer", "zipfile"} & set(done.stdout.split()), "Ctrl-C would show a traceback"
