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

    `replacement` gets the arguments by the names they have in the original's signature, so that it serves every
    version of the package whatever the order of the parameters; `renamed` maps old names to today's.
    """

    def __init__(
        self, original: Callable[..., Any], replacement: Callable[..., Any], renamed: Mapping[str, str] | None = None
    ) -> None:
        self.original = original
        theirs, ours = inspect.signature(original), inspect.signature(replacement)
        names = {name: (renamed or {}).get(name, name) for name in theirs.parameters}
        unknown = [name for name, today in names.items() if today not in ours.parameters]
        if unknown:
            raise UnsupportedError(
                f"the installed {original.__module__}.{original.__name__} takes {', '.join(unknown)}, expected the "
                f"parameters ({', '.join(ours.parameters)}); install a version of the package that has these."
            )
        if list(names.values()) == list(ours.parameters)[: len(names)]:

            @functools.wraps(original)
            def stand_in(*args: Any, **kwargs: Any) -> Any:
                return replacement(*args, **{names.get(name, name): value for name, value in kwargs.items()})

        else:

            @functools.wraps(original)
            def stand_in(*args: Any, **kwargs: Any) -> Any:
                bound = theirs.bind(*args, **kwargs).arguments
                return replacement(**{names[name]: value for name, value in bound.items()})

        self.stand_in = stand_in

    def apply(self) -> None:
        _replace_everywhere(self.original, self.stand_in)

    def restore(self) -> None:
        _replace_everywhere(self.stand_in, self.original)


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
            f"{package} cannot be patched because importing {module} failed ({error}), expected an installed {package}; "
            f"install it, or call the functions of cute_ssd directly."
        ) from error


def _replace_everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """See Note [References]."""
    for name, module in list(sys.modules.items()):
        if module is None or name == "cute_ssd" or name.startswith("cute_ssd."):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, attribute, new)
