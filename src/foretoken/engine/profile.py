"""Profiles: the fastest settings for a target, as `foretoken tune` found them, in a file."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import huggingface_hub

from foretoken.drafters.factory import make_drafter
from foretoken.drafters.shapes import AcceptanceTable
from foretoken.drafters.tree_plan import TreePlan, plan_of
from foretoken.errors import ForetokenError, ParameterError, shown
from foretoken.models import LanguageModel, gguf, load, machine
from foretoken.models.tiny_pair import is_shipped, load_part, tiny_pair_path

VERSION = 1
_KEY = "foretoken_profile"  # its value is the version; marks the JSON as a profile
MEASURED = "measured"
LOAD_OPTIONS = ("dtype", "device", "runner", "quantize", "eager", "n_ctx", "n_gpu_layers")
"""Options of `foretoken.load` that a profile may hold."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_VOLATILE = ("_name_or_path", "transformers_version")  # keys of config.json that do not describe the model


class ProfileError(ForetokenError):
    """A profile can't be used: unreadable, of another version, or made for another target."""


@dataclass(frozen=True)
class Profile:
    """What is fastest for a target on a machine.

    Attributes:
        target: path or hub id of the target; None for the shipped one.
        fingerprint: of the target's files, see `fingerprint`.
        drafter: as `Engine` takes it: a name, a path or hub id, or several with commas.
        verifier: its name.
        num_speculative_tokens: most tokens drafted a round, or "auto".
        tree: as `Engine` takes it, or "measured" for trees by `acceptance`; None for the drafter's default.
        acceptance: rates by depth and rank of `AcceptanceTable`, as they were measured for the drafter.
        load: options of `foretoken.load` that the target was measured with.
        load_drafter: the same of models that draft; empty where none does.
        machine: what it was measured on.
        measured: how it was measured, and what came out, for people.
        apart: what is fastest for ``greedy`` and for ``sampled`` requests alone: ``drafter``, ``verifier``,
            ``num_speculative_tokens`` and ``tree`` of each; empty where it was not measured.
    """

    target: str | None
    fingerprint: Mapping[str, Any]
    drafter: str
    verifier: str
    num_speculative_tokens: int | str
    tree: str | None = None
    acceptance: Sequence[Sequence[float]] | None = None
    load: Mapping[str, Any] = field(default_factory=dict)
    load_drafter: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    apart: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def for_requests(self, sampled: bool | None) -> Profile:
        """The profile of what is fastest for sampled or for greedy requests; None: for both together."""
        if sampled is None:
            return self
        return replace(self, **self.apart.get("sampled" if sampled else "greedy", {}))

    def tree_plan(self) -> TreePlan | None:
        """The drafter's tree plan; None for its default.

        Raises:
            ParameterError: the profile names none.
        """
        if self.tree == MEASURED:
            return plan_of(AcceptanceTable(tuple(map(tuple, self.acceptance or ()))))
        return None if self.tree is None else plan_of(self.tree)

    def save(self, file: str | Path) -> None:
        """Write a file that `read` takes; an existing file is replaced atomically.

        Raises:
            ProfileError: it can't be written.
        """
        file = Path(file)
        try:
            with tempfile.NamedTemporaryFile(
                "w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8"
            ) as opened:
                json.dump({_KEY: VERSION, **asdict(self)}, opened, indent=2)
                opened.write("\n")
            os.chmod(opened.name, 0o644)
            os.replace(opened.name, file)
        except OSError as error:
            raise ProfileError(f"profile {shown(str(file))} can't be written: {error.strerror}") from error

    def check_target(self, target: str | Path | None, name: str) -> None:
        """Check that the profile is this target's; warn if it was made on another machine.

        Args:
            target: path or hub id; None for the shipped one.
            name: of the profile, in messages.

        Raises:
            ProfileError: it was made for another target. A target that is not on this machine is not checked.
        """
        theirs = fingerprint(target)
        for what, mine in self.fingerprint.items():
            if theirs and theirs.get(what) != mine:
                raise ProfileError(
                    f"profile {name!r} was made for {_called(self.target)}, and {_called(target)} is another model: "
                    f"its {what} is {theirs.get(what)} and not {mine}. Make a profile for it with foretoken tune"
                )
        here = this_machine()
        differ = [what for what, value in self.machine.items() if here.get(what) != value]
        if differ:
            changes = ", ".join(f"{what} {self.machine[what]!r}, here {here.get(what)!r}" for what in differ)
            warnings.warn(
                f"profile {name!r} was made on another machine ({changes}): other settings may be faster here; run "
                "foretoken tune to find out",
                stacklevel=3,
            )


def read(file: str | Path) -> Profile:
    """Load a profile from a file.

    Raises:
        ProfileError: it can't be read, holds something else, or is of another version.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(
            f"profile {shown(str(file))} can't be read ({error.strerror}): name a file that foretoken tune -o wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(
            f"{shown(str(file))} is no profile ({error}): name a file that foretoken tune -o has written"
        ) from error
    if not isinstance(content, dict) or _KEY not in content:
        raise ProfileError(f"{shown(str(file))} is no profile: name a file that foretoken tune -o has written")
    version = content.pop(_KEY)
    if version != VERSION:
        raise ProfileError(
            f"profile {shown(str(file))} is of version {version!r}, this is version {VERSION}: make it anew with "
            "foretoken tune, or use the foretoken that wrote it"
        )
    try:
        profile = Profile(**content)
    except TypeError as error:
        raise ProfileError(
            f"profile {shown(str(file))} is damaged ({error}): make it anew with foretoken tune"
        ) from error
    kinds = {
        "target": str | None,
        "fingerprint": dict,
        "drafter": str,
        "verifier": str,
        "num_speculative_tokens": int | str,
        "tree": str | None,
        "acceptance": list if profile.tree == MEASURED else list | None,
        "load": dict,
        "load_drafter": dict,
        "machine": dict,
        "apart": dict,
    }
    for name, kind in kinds.items():
        if not isinstance(getattr(profile, name), kind):
            raise ProfileError(
                f"profile {shown(str(file))} is damaged: its {name} is {getattr(profile, name)!r}: make it anew with "
                "foretoken tune"
            )
    unknown = [option for option in (*profile.load, *profile.load_drafter) if option not in LOAD_OPTIONS]
    if unknown:
        raise ProfileError(
            f"profile {shown(str(file))} is damaged: it loads models with {unknown[0]!r}, and the options are "
            f"{', '.join(LOAD_OPTIONS)}: make it anew with foretoken tune"
        )
    return profile


def engine_arguments(
    profile: str | Path | Profile,
    target: Any,
    options: Mapping[str, Any],
    engine_options: Sequence[str],
    sampled: bool | None = None,
) -> dict[str, Any]:
    """The arguments of the `Engine` that a profile describes, its models loaded.

    Args:
        profile: a profile, or the file that holds one.
        target: the target in any form that `Engine` takes; None for the one that the profile names.
        options: of `Engine` and of `foretoken.load`; they win over the profile's.
        engine_options: names of those that are the engine's own.
        sampled: as in `Profile.for_requests`.

    Raises:
        ProfileError: the profile can't be read, or was made for another target.
        ModelError: a model can't be loaded, or does not fit the target.
        ParameterError: a wrong option, or `profile` is neither a profile nor a path.
    """
    if not isinstance(profile, str | Path | Profile):
        raise ParameterError(f"profile is {shown(profile)}: name a file that foretoken tune -o has written")
    name = str(profile.target if isinstance(profile, Profile) else profile)
    if not isinstance(profile, Profile):
        profile = read(profile)
    profile = profile.for_requests(sampled)
    target = profile.target if target is None else target
    source = target if target is None or isinstance(target, str | Path) else _source(target)
    profile.check_target(source, name)
    load_options = {option: value for option, value in options.items() if option not in engine_options}
    loading = {**profile.load, **load_options}
    model = load_part("target", **loading) if target is None else load(target, **loading)
    settings = {
        "drafter": profile.drafter,
        "verifier": profile.verifier,
        "num_speculative_tokens": profile.num_speculative_tokens,
        **{option: value for option, value in options.items() if option in engine_options},
    }
    tree = settings.pop("tree", None if "drafter" in options else profile.tree_plan())
    drafter = make_drafter(
        settings.pop("drafter"),
        model,
        tree=None if tree is None else plan_of(tree),
        vocab=settings.get("vocab", "auto"),
        **{**profile.load_drafter, **load_options},
    )
    return {"target": model, "drafter": drafter, **settings}


def _source(model: Any) -> str | None:
    """What a loaded model was loaded from; None for the shipped target."""
    if is_shipped(model):
        return None
    return model.name if isinstance(model, LanguageModel) else str(getattr(model.config, "name_or_path", ""))


def fingerprint(target: str | Path | None) -> dict[str, Any]:
    """A fingerprint of a target's files, made without reading the weights.

    Args:
        target: a GGUF file, a folder, a hub id with a local copy in the cache, or None for the shipped target.

    Returns:
        A digest of the configuration, and the sizes of the files of weights in bytes, by name. Empty for what is not
        on this machine.
    """
    file = None if target is None else gguf.find(target)
    if file is not None:
        return {"weights": {part.name: part.stat().st_size for part in gguf.parts_of(file)}}
    folder = _folder(target)
    if folder is None:
        return {}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    described = json.dumps({name: value for name, value in config.items() if name not in _VOLATILE}, sort_keys=True)
    weights = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    return {
        "configuration": hashlib.sha256(described.encode()).hexdigest()[:16],
        "weights": {file.name: file.stat().st_size for file in weights},
    }


def _folder(target: str | Path | None) -> Path | None:
    if target is None:
        return tiny_pair_path() / "target"
    if (Path(target) / "config.json").is_file():
        return Path(target)
    try:
        found = huggingface_hub.try_to_load_from_cache(str(target), "config.json")
    except huggingface_hub.errors.HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def this_machine() -> dict[str, Any]:
    """Hardware that decides which settings are fastest."""
    import torch

    described = machine.describe("cuda" if torch.cuda.is_available() else "cpu")
    result = {"cpu": described["cpu"], "cores": described["cores"]}
    if "gpu" in described:
        result["gpu"] = described["gpu"]["name"]
    return result


def _called(target: str | Path | None) -> str:
    return "the shipped target" if target is None else str(target)
