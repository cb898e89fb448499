"""Files that are broken, foreign or none of a language model: what is said about them. And where files are found."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import gguf as writer
import numpy as np
import pytest

from foretoken.errors import ModelError
from foretoken.models import load
from foretoken.models.gguf import layouts, library
from tiny import tiny_gpt2, tiny_llama


@pytest.fixture
def whole(files):
    return files("llama", tiny_llama)[1]


def edited(path, folder, edit):
    data = bytearray(path.read_bytes())
    edit(data)
    new = folder / "edited.gguf"
    new.write_bytes(data)
    return new


def version(number):
    def edit(data):
        data[4:8] = number

    return edit


def unknown_architecture(folder):
    made = writer.GGUFWriter(folder / "edited.gguf", "blancmange")
    made.add_block_count(1)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return folder / "edited.gguf"


BROKEN = {
    "empty": (lambda data: data.clear(), "no GGUF file: it begins with b''"),
    "only a beginning": (lambda data: data.__delitem__(slice(10, None)), "cut off after 10 bytes: download it again"),
    "foreign": (lambda data: data.__setitem__(slice(0, 4), b"PK\3\4"), "it begins with b'PK"),
    "GGML": (lambda data: data.__setitem__(slice(0, 4), b"lmgg"), "a GGML file, a format before GGUF"),
    "pointer": (lambda data: data.__setitem__(slice(0, 30), b"version https://git-lfs.github"), "git lfs pull"),
    "newer": (version(b"\x09\0\0\0"), "version 9 of GGUF, and 2 and 3 can be read: update llama.cpp"),
    "oldest": (version(b"\x01\0\0\0"), "version 1 of GGUF"),
    "big-endian": (version(b"\0\0\0\x03"), "big-endian"),
    "cut in the header": (lambda data: data.__delitem__(slice(200, None)), "edited.gguf"),
    "cut in the weights": (lambda data: data.__delitem__(slice(-4000, None)), "cut off or broken: download it again"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_the_reason(name, whole, tmp_path):
    edit, message = BROKEN[name]
    with pytest.raises(ModelError, match=message):
        load(edited(whole, tmp_path, edit))


def test_an_architecture_that_llama_cpp_does_not_know_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"architecture 'blancmange', which xllamacpp .* does not know: update it"):
        load(unknown_architecture(tmp_path))


def test_of_a_model_in_parts_that_is_refused_the_reason_is_told(tmp_path):
    for part in (1, 2):
        made = writer.GGUFWriter(tmp_path / f"model-0000{part}-of-00002.gguf", "blancmange")
        made.add_block_count(1)
        made.add_uint16("split.no", part - 1)
        made.add_uint16("split.count", 2)
        made.add_int32("split.tensors.count", 0)
        made.write_header_to_file()
        made.write_kv_data_to_file()
        made.write_tensors_to_file()
        made.close()
    with pytest.raises(ModelError, match=r"architecture 'blancmange', which xllamacpp .* does not know: update it"):
        load(tmp_path)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"there is no file .*nothing\.gguf"):
        load(tmp_path / "nothing.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelError, match=r"folder\.gguf"):
        load(tmp_path / "folder.gguf")


@pytest.mark.parametrize("alignment", [0, "wide"])
def test_an_alignment_that_is_none_is_a_broken_file(alignment, files):
    path = files(f"alignment {alignment}", tiny_llama, general__alignment=alignment)[1]
    with pytest.raises(ModelError, match="cut off or broken"):
        load(path)


def described(path, architecture, kind):
    made = writer.GGUFWriter(path, architecture)
    made.add_type(kind)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ("llama", "adapter", "is an adapter: merge it into its model"),
        ("clip", "mmproj", "reads pictures or sounds: give the file of the model itself"),
        ("clip", "model", "reads pictures or sounds"),
        ("", "imatrix", "is a matrix of importance"),
    ],
)
def test_a_file_that_belongs_to_a_model_is_refused_for_what_it_is(architecture, kind, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        load(described(tmp_path / "other.gguf", architecture, kind))


@pytest.mark.parametrize("name", ["https://huggingface.co/a/b/resolve/main/m.gguf", "HTTP://a/m.gguf"])
def test_an_address_is_no_path(name):
    with pytest.raises(ModelError, match="is an address: download the file"):
        load(name)


def test_a_path_with_a_null_character_is_no_file():
    with pytest.raises(ModelError, match="there is no file"):
        load("a\0b.gguf")


def test_any_name_of_a_file_is_a_path(whole, tmp_path):
    for name in ("mit Leerzeichen – 日本.gguf", os.fsdecode(b"bad\xff.gguf")):
        try:
            (tmp_path / name).write_bytes(whole.read_bytes())
        except (OSError, UnicodeError):  # where names of files are Unicode
            continue
        assert load(tmp_path / name, runner="gguf").vocab_size == 32


def test_an_embedding_model_is_refused(files):
    _, path = files("embedding", tiny_llama, None, llama__pooling_type=1)
    with pytest.raises(ModelError, match=r"embedding model .* writes no text"):
        load(path)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"n_gpu_layers": -1}, "n_gpu_layers is -1"),
        ({"n_threads": 0}, "n_threads is 0"),
        ({"n_threads": 100_000}, "n_threads is 100,000: give at most 1,024"),
        ({"cache_type": "int3"}, "cache_type"),
        ({"quantize": "int8"}, "rounded as it comes"),
        ({"runner": "hf"}, "which transformers doesn't run: use runner='native' or 'gguf'"),
        ({"device_map": "auto"}, "device_map='auto' is an option of transformers"),
    ],
)
def test_wrong_options_are_refused(option, message, whole):
    with pytest.raises(ModelError, match=message):
        load(whole, **option)


def test_a_context_beyond_a_table_of_positions_is_refused(files):
    path = files("short gpt2", lambda: tiny_gpt2(8, seed=2, n_positions=12))[1]
    assert load(path, n_ctx=12).max_length == 12
    with pytest.raises(ModelError, match=r"n_ctx is 13, and .* has a table of 12 positions"):
        load(path, n_ctx=13)


def test_a_folder_with_one_file_is_that_file_and_one_with_two_is_ambiguous(whole, tmp_path):
    (tmp_path / "a.gguf").write_bytes(whole.read_bytes())
    assert load(tmp_path).vocab_size == 32
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"2 GGUF models \(a\.gguf, b\.gguf\): give the path of one"):
        load(tmp_path)


def test_a_config_without_weights_and_a_projector_leave_a_folder_its_one_file(whole, tmp_path):
    """As in folders of the hub that hold both."""
    (tmp_path / "a.GGUF").write_bytes(whole.read_bytes())
    (tmp_path / "a-mmproj-f16.gguf").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load(tmp_path).vocab_size == 32
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="SafetensorError"):  # the checkpoint is meant
        load(tmp_path)


def test_a_file_is_known_by_its_beginning_where_it_has_no_ending(whole, tmp_path):
    (tmp_path / "sha256-0123").write_bytes(whole.read_bytes())
    assert load(tmp_path / "sha256-0123").vocab_size == 32


def split(whole, folder):
    """The file's tensors in two parts."""
    reader = writer.GGUFReader(whole)
    half = len(reader.tensors) // 2
    paths = [folder / f"model-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part, path in enumerate(paths):
        made = writer.GGUFWriter(path, "llama")
        made.add_uint16("split.no", part)
        made.add_uint16("split.count", 2)
        made.add_int32("split.tensors.count", len(reader.tensors))
        if part == 0:
            for key, entry in reader.fields.items():
                if not key.startswith(("GGUF.", "general.architecture")):
                    made.add_key_value(key, entry.contents(), entry.types[0])
        for tensor in reader.tensors[:half] if part == 0 else reader.tensors[half:]:
            made.add_tensor(tensor.name, np.array(tensor.data))
        made.write_header_to_file()
        made.write_kv_data_to_file()
        made.write_tensors_to_file()
        made.close()
    return paths


def test_a_model_in_parts_is_loaded_from_any_of_them_and_a_missing_one_is_named(whole, tmp_path):
    first, second = split(whole, tmp_path)
    one = load(whole)
    for name in (first, second, tmp_path):
        model = load(name)
        assert (model.weight_bytes, model.max_length) == (one.weight_bytes, one.max_length)
    for part in (first, second):
        (tmp_path / part.name.upper()).write_bytes(part.read_bytes())
    assert load(tmp_path / first.name.upper()).weight_bytes == one.weight_bytes
    (tmp_path / "renamed.gguf").write_bytes(second.read_bytes())
    with pytest.raises(ModelError, match=r"is part 2 of 2: .* the names that they had \(such as model-00002-of-00002"):
        load(tmp_path / "renamed.gguf")
    second.unlink()
    with pytest.raises(ModelError, match=r"1 of them are not beside it: model-00002-of-00002\.gguf"):
        load(first)


def test_options_of_the_file_and_of_the_call(whole):
    model = load(whole, n_ctx=100, mmap=False)
    assert (model.max_length, load(whole).max_length) == (100, 256)
    assert model.quantize is None
    assert (model.tokenizer, model.eos_token_ids) == (None, ())  # the file has no vocabulary
    # 2 layers of 2 heads of 8, keys and values, four bytes each: 1,024 tokens are the least.
    assert model.cache_bytes([10]) == 1024 * 2 * 2 * 8 * 2 * 4
    assert model.cache_bytes([1000, 1000]) == 5000 * 2 * 2 * 8 * 2 * 4
    assert model.cache_bytes([1] * 33) == 2 * 1024 * 2 * 2 * 8 * 2 * 4  # two contexts


def test_a_shifted_structure_is_found_out():
    """Each layout but the right one has a default that does not fit: nothing is written to a wrong field."""
    found = library.library()
    right = type(found.context_params())
    assert layouts.context_mismatch(found.context_params()) is None

    class Shifted(ctypes.Structure):
        _fields_ = [("new", ctypes.c_uint32), *right._fields_]

    for wrong in (*(one for one in layouts.CONTEXT_LAYOUTS.values() if one is not right), Shifted):
        data = bytes(found.context_params())
        moved = wrong.from_buffer_copy(data + bytes(ctypes.sizeof(wrong)))
        assert layouts.context_mismatch(moved) is not None
    params = found.model_params()
    params.split_mode = 77
    assert layouts.model_mismatch(params) == "split_mode is 77, not 1"


def test_a_library_of_an_unknown_layout_is_refused_with_versions(monkeypatch):
    home = library.library().home
    monkeypatch.setattr(layouts, "CONTEXT_LAYOUTS", {"0.5": layouts.ContextParams05})
    with pytest.raises(
        ModelError, match=rf"{home.package} {home.version} \(llama.cpp .*\) lays its context parameters"
    ):
        library.Library(home)


def test_without_a_library_the_way_to_install_one_is_told(monkeypatch, whole):
    monkeypatch.setattr(library, "find_homes", list)
    library.library.cache_clear()
    try:
        with pytest.raises(ModelError, match=r"not installed: run pip install '\.\[gguf\]'"):
            load(whole)
    finally:
        library.library.cache_clear()


def test_a_library_that_the_environment_names_is_taken_or_refused_by_that_name(monkeypatch, tmp_path):
    installed = library.library().home.file
    (tmp_path / "libllama.so").symlink_to(installed)
    (tmp_path / "broken.so").write_text("no library")
    library.library.cache_clear()
    try:
        for name in (tmp_path, tmp_path / "libllama.so"):
            monkeypatch.setenv("FORETOKEN_LLAMA_CPP", str(name))
            assert str(library.library().home) == installed
            library.library.cache_clear()
        monkeypatch.setenv("FORETOKEN_LLAMA_CPP", str(tmp_path / "broken.so"))
        with pytest.raises(ModelError, match=r"names .*broken\.so, which can't be loaded"):
            library.library()
        monkeypatch.setenv("FORETOKEN_LLAMA_CPP", str(tmp_path / "nothing"))
        with pytest.raises(ModelError, match="neither a file nor a folder with libllama"):
            library.library()
    finally:
        library.library.cache_clear()


def test_a_library_without_back_ends_is_refused(monkeypatch):
    home = library.library().home
    monkeypatch.setattr(library.Library, "ggml_backend_reg_count", lambda self: 0, raising=False)
    monkeypatch.setattr(library.Library, "ggml_backend_load_all_from_path", lambda self, path: None, raising=False)
    with pytest.raises(ModelError, match="no back ends"):
        library.Library(home)


def test_a_library_that_was_built_here_is_preferred(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libllama.so").touch()
    found = library.importlib.util.find_spec

    def find_spec(name):
        return SimpleNamespace(submodule_search_locations=[str(tmp_path)]) if name == "llama_cpp" else found(name)

    monkeypatch.setattr(library.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(library.importlib.metadata, "version", lambda name: "1.2")
    homes = library.find_homes()
    assert [home.package for home in homes] == ["llama-cpp-python", "xllamacpp"]
    assert homes[0].file == str(tmp_path / "lib" / "libllama.so")
    assert str(homes[0]) == "llama-cpp-python 1.2"


def test_what_the_library_itself_lacks_is_told(whole, tmp_path):
    """As in small container images, which have no OpenMP."""
    package = tmp_path / "xllamacpp"
    package.mkdir()
    (package / "xllamacpp.abi3.so").touch()
    lacks = "libgomp.so.1: cannot open shared object file"
    (package / "__init__.py").write_text(f"raise ImportError({lacks!r})\n")
    script = f"""
from foretoken import load
from foretoken.errors import ModelError
try:
    load({str(whole)!r}, runner="gguf")
except ModelError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert f"can't be loaded ({lacks}): if that names a library of the system, install it" in done.stdout, done.stderr
