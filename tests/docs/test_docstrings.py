"""Docstrings name the arguments that there are."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType

import foretoken

# These are run by the interpreters of other engines, whose packages they import.
ELSEWHERE = ("foretoken.peers.workers", "foretoken.integrations.vllm", "foretoken.__main__")


def modules() -> Iterator[ModuleType]:
    """All modules whose packages are installed."""
    for module in pkgutil.walk_packages(foretoken.__path__, "foretoken."):
        if not module.name.startswith(ELSEWHERE):
            try:
                yield importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if str(error.name).startswith("foretoken"):
                    raise


def described(module: ModuleType) -> Iterator[tuple[str, Callable, str]]:
    """Public functions, classes and methods whose docstrings have a section `Args`, which is returned."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__ or not isinstance(value, FunctionType | type):
            continue
        members = vars(value).items() if isinstance(value, type) else ()
        own = [(f"{name}.{key}", getattr(member, "__func__", member)) for key, member in members]
        for place, thing in [(name, value), *(pair for pair in own if isinstance(pair[1], FunctionType))]:
            section = re.search(r"^Args:\n((?: +.*\n?|\n)*)", inspect.getdoc(thing) or "", flags=re.MULTILINE)
            if section and not any(part.startswith("_") for part in place.split(".")):
                yield f"{module.__name__}.{place}", thing, textwrap.dedent(section[1])


def test_arguments_are_in_the_signature():
    wrong, seen = {}, 0
    for module in modules():
        for place, thing, section in described(module):
            lists = re.findall(r"^([\w`*][\w`*, ]*):", section, flags=re.MULTILINE)
            told = {name.strip("`* ") for names in lists for name in names.split(",")}
            if unknown := told - set(inspect.signature(thing).parameters):
                wrong[place] = unknown
            seen += 1
    assert seen > 300
    assert not wrong
