"""Engines that a transformers model keeps: they go when it goes, or when the function that they were made for does."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, ref

from foretoken.engine.engine import Engine
from foretoken.models.traits import vocab_size

_ATTRIBUTE = "_foretoken_engines"


class Owner:
    """What an engine is made for: one set of options. An engine is kept as long as its owner is."""


class KeptEngines:
    """Engines of a model by their owners. Copies of the model, pickled ones included, begin without any.

    They are kept on the model, since an engine refers to its model: a table of engines by model, even one with weak
    keys, would keep every model in it.
    """

    def __init__(self) -> None:
        self._making = RLock()
        self._owners: dict[Any, Owner] = {}
        self._made: WeakKeyDictionary[Owner, tuple[ref[Any], int, Engine]] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._made)

    def owner(self, settings: Any) -> Owner:
        """The owner of engines with such settings, kept as long as the model is."""
        return self._owners.setdefault(settings, Owner())

    def of(self, model: Any, owner: Owner, make: Callable[[Any], Engine]) -> Engine:
        """The engine of an owner, made if there is none, or if the vocabulary has changed since.

        Args:
            model: that these engines are kept on; or a shallow copy of it, which has its own.
            owner: as said.
            make: makes an engine for a model.
        """
        # Threads that come at once get one engine. Not by the model's turn: whoever has that, and waits for a draft
        # model's to wrap it, and a round that has this one already, would wait for each other.
        with self._making:
            size = vocab_size(model)
            found = self._made.get(owner)
            if found is not None and found[0]() is model and found[1] == size:
                return found[2]
            engine = make(model)
            self._made[owner] = ref(model), size, engine
            return engine

    def __deepcopy__(self, memo: Any) -> KeptEngines:
        return KeptEngines()

    def __reduce__(self) -> Any:
        return KeptEngines, ()


def kept_engines(model: Any) -> KeptEngines:
    """Those of a model."""
    kept: KeptEngines = model.__dict__.setdefault(_ATTRIBUTE, KeptEngines())
    return kept
