"""The source's layout: which module may import which, lengths of files, and what no module does."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from foretoken.drafters import Drafter
from foretoken.models import Cache, LanguageModel
from foretoken.verify import CoupledVerifier, Verifier

SRC = Path(__file__).parents[1] / "src" / "foretoken"
FILES = {
    ".".join(("foretoken", *file.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in sorted(SRC.rglob("*.py"))
}

MOST_LINES = 400
MOST_LINES_OF = {"foretoken.policy": 350}  # what decides has to be read whole

FOREIGN = {  # modules that read objects of other libraries, whose attributes depend on their version or family
    "foretoken.audit.reference": "transformers configs",
    "foretoken.audit.subjects": "functions of users",
    "foretoken.audit.worlds": "exceptions",
    "foretoken.audit.transformers_subject": "transformers modules",
    "foretoken.cli.app": "tokenizers",
    "foretoken.cli.setup": "tokenizers",
    "foretoken.drafters.vocabularies": "tokenizers",
    "foretoken.engine.profile": "transformers modules",
    "foretoken.engine.prompts": "tokenizers",
    "foretoken.heads.eagle3": "transformers configs",
    "foretoken.index.builder": "tokenizers",
    "foretoken.integrations.refusals": "generation configs",
    "foretoken.integrations.vllm.plugin": "vLLM's modules",
    "foretoken.models.attention": "transformers configs",
    "foretoken.models.gguf.library": "functions of llama.cpp",
    "foretoken.models.hf": "transformers configs",
    "foretoken.models.loading": "transformers modules",
    "foretoken.models.masks": "transformers configs",
    "foretoken.models.native.spec": "transformers configs",
    "foretoken.models.placement": "transformers configs",
    "foretoken.models.probe": "transformers configs",
    "foretoken.models.processor": "torch's private functions",
    "foretoken.models.sampling_defaults": "transformers modules",
    "foretoken.models.seq2seq": "transformers modules",
    "foretoken.models.tokenizers": "tokenizers",
    "foretoken.models.traits": "transformers modules",
    "foretoken.models.transformers_loading": "transformers configs",
    "foretoken.models.wrapping": "transformers modules",
    "foretoken.serve.response_template": "tokenizers",
    "foretoken.serve.service": "tokenizers",
    "foretoken.train.learners": "transformers configs",
    "foretoken.train.prompts": "tokenizers",
    "foretoken.train.teacher": "transformers configs",
    "foretoken.workloads.prompts": "tokenizers",
}

# Names that objects of other libraries have, too.
SHARED_NAMES = {"hidden_size", "eos_token_ids", "decoder_start_token_id", "device", "dtype", "name"}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Each module that an import statement imports, with the name taken from it; empty for the module itself."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide where an arrow points"
        yield from ((node.module or "", alias.name) for alias in node.names)


def at_import(module: str) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: not those of functions, nor those for type checkers."""
    pending: list[ast.AST] = list(tree(module).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        yield node
        pending += ast.iter_child_nodes(node)


def target(module: str, name: str) -> str:
    return f"{module}.{name}" if f"{module}.{name}" in FILES else module


@cache
def graph() -> dict[str, set[str]]:
    """For each module, the modules of this package that are imported when it is."""
    return {
        module: {
            target(*pair)
            for node in at_import(module)
            for pair in imported(node)
            if pair[0].partition(".")[0] == "foretoken"
        }
        - {module}
        for module in FILES
    }


def package(module: str) -> str:
    """The package below the root that a module is in, or the module itself where it is at the root."""
    return ".".join(module.split(".")[:2])


def all_imports(module: str) -> set[str]:
    """All modules of this package that a module imports, in functions too."""
    return {
        target(*pair)
        for node in ast.walk(tree(module))
        for pair in imported(node)
        if pair[0].partition(".")[0] == "foretoken"
    }


def test_there_are_no_import_circles():
    TopologicalSorter(graph()).prepare()


def test_packages_import_each_other_in_one_direction():
    edges: dict[str, set[str]] = {}
    for module, others in graph().items():
        edges.setdefault(package(module), set()).update(package(other) for other in others)
    for name, others in edges.items():
        others -= {name, "foretoken"}
    TopologicalSorter({name: others for name, others in edges.items() if name != "foretoken"}).prepare()


def test_a_circle_is_found():
    with pytest.raises(CycleError):
        TopologicalSorter({**graph(), "foretoken.errors": {"foretoken.drafters.base"}}).prepare()


@pytest.mark.parametrize(
    ("name", "never"),
    [
        ("verify", ("models", "drafters", "engine", "policy", "heads")),
        ("sampling", ("models", "drafters", "engine", "verify")),
        ("models", ("drafters", "engine", "verify", "heads", "policy")),
        ("heads", ("drafters", "engine", "verify")),
        ("drafters", ("engine", "bench", "audit", "tune", "train", "cli")),
        ("index", ("engine", "drafters")),
        ("policy", ("engine", "bench", "audit")),
        ("engine", ("bench", "audit", "tune", "train", "cli", "peers", "pages", "workloads", "serve")),
        ("serve", ("audit", "bench", "tune", "train", "cli", "peers", "workloads")),
        ("audit", ("bench", "cli")),
        ("bench", ("audit", "cli", "tune")),
        ("tune", ("audit", "cli")),
        ("peers", ("audit", "bench", "cli", "tune")),
        ("workloads", ("audit", "bench", "cli", "tune", "engine")),
        ("pages", ("audit", "bench", "cli", "tune", "engine")),
        ("train", ("audit", "bench", "cli", "tune", "peers")),
    ],
)
def test_arrows_point_down(name, never):
    wrong = {
        (module, other)
        for module in FILES
        if package(module) == f"foretoken.{name}"
        for other in all_imports(module)
        if package(other) in {f"foretoken.{one}" for one in never}
    }
    assert not wrong


def test_few_modules_are_at_the_root():
    root = {file.stem for file in SRC.glob("*.py")} - {"__init__", "__main__"}
    assert len(root) <= 8, sorted(root)


def test_no_private_name_is_imported():
    private = {
        (module, f"{source}.{name}")
        for module in FILES
        for node in ast.walk(tree(module))
        for source, name in imported(node)
        if source.partition(".")[0] == "foretoken"
        and any(part.startswith("_") and not part.endswith("__") for part in (*source.split("."), name))
    }
    assert not private


def test_no_file_is_long():
    lengths = {module: len(file.read_text(encoding="utf-8").splitlines()) for module, file in FILES.items()}
    most = {module: MOST_LINES_OF.get(module.rpartition(".")[0], MOST_LINES) for module in lengths}
    assert not {module: length for module, length in lengths.items() if length > most[module]}


MOST_METHODS = 16
MORE_METHODS = {
    "GgufTokenizer": 22,  # the interface of transformers' tokenizers
    "Cascade": 19,  # the drafter's contract
    "Conversation": 19,  # a method for each command of a chat
    "DecoderGraph": 17,
    "Engine": 17,  # what users call
    "OpenVinoBackend": 17,
}


def test_no_class_has_many_methods():
    """Counted by name: a property and its setter, or the overloads of a method, are one."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    methods = {
        (module, found.name): {one.name for one in found.body if isinstance(one, functions)}
        for module in FILES
        for found in ast.walk(tree(module))
        if isinstance(found, ast.ClassDef)
    }
    counts = {of: len(names) for of, names in methods.items()}
    assert not {of: count for of, count in counts.items() if count > MORE_METHODS.get(of[1], MOST_METHODS)}


def defaults() -> Iterator[tuple[str, int, str | None]]:
    """Every ``getattr`` with a default: module, line, and the attribute where it is written out."""
    for module in FILES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) == 3:
                attribute = node.args[1]
                yield module, node.lineno, attribute.value if isinstance(attribute, ast.Constant) else None


def test_attributes_of_this_packages_classes_have_their_defaults_in_the_contract():
    """`getattr` with a default is for objects of other libraries."""
    contracts = {
        name
        for kind in (Drafter, LanguageModel, Cache, Verifier, CoupledVerifier)
        for name, _ in [*inspect.getmembers(kind), *((name, None) for name in inspect.get_annotations(kind))]
        if not name.startswith("_")
    }
    assert {"own_threads", "models", "tree", "drawn_only", "prefills_with_decode", "vocab_size"} <= contracts
    found = list(defaults())
    assert found
    assert not [one for one in found if one[2] in contracts - SHARED_NAMES]
    assert {module for module, *_ in found} <= set(FOREIGN)
