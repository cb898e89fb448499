"""The fake engine's program and environment, for tests of processes, benchmarks and audits."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from foretoken.peers.kinds import MODES, EngineKind
from foretoken.peers.process import WORKERS


def make_fake(folder: Path) -> Path:
    """The fake engine's program in a folder, beside the protocol, as workers of the package are."""
    shutil.copy(WORKERS / "protocol.py", folder / "foretoken_protocol.py")
    shutil.copy(Path(__file__).parent / "fake_worker.py", folder)
    return folder / "fake_worker.py"


def make_environments(folder: Path) -> Path:
    """A folder with an environment for the fake engine."""
    (folder / "fake" / "bin").mkdir(parents=True)
    (folder / "fake" / "bin" / "python").symlink_to(sys.executable)
    return folder


def fake_kind(program: Path) -> EngineKind:
    """The fake engine; one process for all its modes."""
    return EngineKind("fake", MODES, str(program), ("fake",), ("fake",), batched=MODES[:2])
