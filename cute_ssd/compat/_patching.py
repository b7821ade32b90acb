"""Putting a function in the place of another, everywhere, and back.

Note [References]: `from package import function` binds the function a second time, so replacing it where it is
defined misses every module that has imported it. A `Redirect` therefore replaces it in every loaded module that
refers to it, under whatever name, and on the way back looks again: a module loaded in between holds the replacement.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from ..errors import UnsupportedError


class Handle:
    """What `enable` returns.

    `disable()` restores the original, whichever call of `enable` replaced it; a second `disable()` does nothing.
    As a context manager it undoes, on leaving, only what its own `enable` changed: a block inside another one, or
    inside code that has already called `enable`, leaves the outer one in force.
    """

    def __init__(self, disable: Callable[[], None], leave: Callable[[], None]) -> None:
        self._disable = disable
        self._leave = leave

    def disable(self) -> None:
        self._disable()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave()


class Redirect:
    """One function of an installed package, to be replaced by `replacement`.

    Where their signatures differ, `replacement` gets the arguments by the names and with the defaults that the
    original has for them, so that it serves versions of the package with another order of parameters; `renamed` maps
    their names to those of `replacement`. A `replacement` with **kwargs takes everything as it comes.
    """

    def __init__(
        self, original: Callable[..., Any], replacement: Callable[..., Any], renamed: Mapping[str, str] | None = None
    ) -> None:
        self.original = original
        call = _by_name(original, replacement, renamed or {})

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        self.stand_in = stand_in

    def apply(self) -> None:
        _replace_everywhere(self.original, self.stand_in)

    def restore(self) -> None:
        _replace_everywhere(self.stand_in, self.original)


def _by_name(
    original: Callable[..., Any], replacement: Callable[..., Any], renamed: Mapping[str, str]
) -> Callable[..., Any]:
    signature, ours = inspect.signature(original), inspect.signature(replacement).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in ours.values()):
        return replacement
    theirs = signature.parameters
    unknown = [name for name in theirs if renamed.get(name, name) not in ours]
    if unknown:
        raise UnsupportedError(
            f"the installed {original.__module__}.{original.__name__} takes {', '.join(unknown)}, expected the "
            f"parameters ({', '.join(ours)}); install a version of the package that has these."
        )
    same_order = list(theirs) == list(ours)[: len(theirs)]
    if same_order and all(p.default in (p.empty, ours[name].default) for name, p in theirs.items()):
        return replacement

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return replacement(**{renamed.get(name, name): value for name, value in bound.arguments.items()})

    return call


class PackagePatch:
    """The `enable` of a whole package: its redirects, which are in force or not."""

    def __init__(self, find: Callable[[], list[Redirect]]) -> None:
        self._find = find
        self._in_force: list[Redirect] = []

    def enable(self) -> Handle:
        if self._in_force:
            return Handle(self._disable, lambda: None)
        self._in_force = self._find()
        for redirect in self._in_force:
            redirect.apply()
        return Handle(self._disable, self._disable)

    def _disable(self) -> None:
        for redirect in self._in_force:
            redirect.restore()
        self._in_force = []


def installed(package: str, module: str) -> ModuleType:
    """The module of an installed package; `UnsupportedError` where there is none."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"{package} cannot be patched because importing {module} failed ({error}), expected an installed "
            f"{package}; install it, or call the functions of cute_ssd directly."
        ) from error


def _replace_everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """See Note [References]."""
    for name, module in list(sys.modules.items()):
        if module is None or name == "cute_ssd" or name.startswith("cute_ssd."):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, attribute, new)
