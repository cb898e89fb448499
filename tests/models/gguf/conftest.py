"""GGUF files of tiny models, each written once for all tests of a session."""

from __future__ import annotations

import pytest

pytest.importorskip("xllamacpp", reason="GGUF files need llama.cpp: pip install '.[gguf]'")
pytest.importorskip("gguf", reason='GGUF files of tests need the "gguf" package')

from foretoken.models import gguf
from models.gguf.gguf_files import write


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """``files(name, make, tokenizer=None, **metadata)``: a transformers model and its file."""
    folder = tmp_path_factory.mktemp("gguf")
    made = {}

    def file(name, make, tokenizer=None, kinds=None, **metadata):
        if name not in made:
            module = make()
            made[name] = module, write(module, folder / f"{name}.gguf", tokenizer, kinds, **metadata)
        return made[name]

    return file


@pytest.fixture(scope="session")
def load(files):
    """``load(name, make, **options)``: a model, whose transformers model is the attribute `module`."""

    def loaded(name, make, tokenizer=None, **options):
        module, path = files(name, make, tokenizer)
        model = gguf.load(path, name, gguf.Options(**options))
        model.module = module
        return model

    return loaded
