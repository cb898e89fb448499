"""GGUF files of tiny models, made once."""

from __future__ import annotations

import pytest

pytest.importorskip("xllamacpp", reason='GGUF files need llama.cpp: pip install "foretoken[gguf]"')
pytest.importorskip("gguf", reason='GGUF files of tests need the "gguf" package')
