"""Engines that a transformers model keeps: they go when it goes, or when the function that they were made for does."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary, ref

from foretoken.engine.engine import Engine
from foretoken.models.traits import device_of, vocab_size

_ATTRIBUTE = "_foretoken_engines"
_MOST_OWNERS = 8
"""Sets of options whose engines a model keeps; the one that was longest without a call goes first."""


class Owner:
    """What an engine is made for: one set of options. An engine is kept as long as its owner is."""


class KeptEngines:
    """Engines of a model by their owners. Copies of the model, pickled ones included, begin without any.

    They are kept on the model, since an engine refers to its model: a table of engines by model, even one with weak
    keys, would keep every model in it.
    """

    def __init__(self) -> None:
        self._making = RLock()
        self._finding = Lock()
        self._owners: dict[Hashable, Owner] = {}  # least recently used first
        self._made: WeakKeyDictionary[Owner, tuple[ref[Any], Hashable, Engine]] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._made)

    def owner(self, settings: Any) -> Owner:
        """The owner of engines with such settings: kept with the model, while it is among the last ones used.

        Args:
            settings: lists, tuples and dicts are compared by what is in them, other values by their own equality, and
                those that can't be hashed by identity.
        """
        key = _key(settings)
        with self._finding:
            found = self._owners[key] = self._owners.pop(key) if key in self._owners else Owner()
            if len(self._owners) > _MOST_OWNERS:  # a call that has the oldest one holds it until it is done
                del self._owners[next(iter(self._owners))]
            return found

    def of(self, model: Any, owner: Owner, make: Callable[[Any], Engine]) -> Engine:
        """The engine of an owner, made if there is none, or if the vocabulary, device or dtype has changed since.

        Args:
            model: that these engines are kept on; or a shallow copy of it, which has its own.
            owner: as said.
            make: makes an engine for a model.
        """
        # Threads that come at once get one engine. Not by the model's turn: whoever has that, and waits for a draft
        # model's to wrap it, and a round that has this one already, would wait for each other.
        with self._making:
            traits = vocab_size(model), device_of(model), model.dtype
            found = self._made.get(owner)
            if found is not None and found[0]() is model and found[1] == traits:
                return found[2]
            engine = make(model)
            self._made[owner] = ref(model), traits, engine
            return engine

    def __deepcopy__(self, memo: Any) -> KeptEngines:
        return KeptEngines()

    def __reduce__(self) -> Any:
        return KeptEngines, ()


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal to itself alone; holds the object, so that no other one can have its id."""

    one: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.one is self.one

    def __hash__(self) -> int:
        return id(self.one)


def _key(value: Any) -> Hashable:
    """Equal for equal settings; types count, since an option may take 1 and True, or a name and a path, differently."""
    if isinstance(value, list | tuple):
        return type(value), *map(_key, value)
    if isinstance(value, dict):
        return dict, frozenset((name, _key(one)) for name, one in value.items())
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value


def kept_engines(model: Any) -> KeptEngines:
    """Those of a model."""
    kept: KeptEngines = model.__dict__.setdefault(_ATTRIBUTE, KeptEngines())
    return kept
