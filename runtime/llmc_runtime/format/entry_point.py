"""Classes that installed packages offer under a name, as entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_T = TypeVar("_T")


def offers(group: str, name: str) -> bool:
    """Return whether an installed package offers an entry point of this group and name."""
    return bool(_points(group, name))


def offered_class(group: str, name: str, base: type[_T]) -> tuple[type[_T] | None, str]:
    """Return (subclass of `base`, "") or (None, why there is none).

    Importing the class runs code of its package.
    """
    points = _points(group, name)
    if len(points) != 1:
        return None, "more than one package offers it" if points else "no installed package offers it"
    try:
        loaded = points[0].load()
    except Exception as error:
        return None, f"{points[0].value} cannot be loaded: {type(error).__name__}: {error}"
    if isinstance(loaded, type) and issubclass(loaded, base):
        return loaded, ""
    return None, f"{points[0].value} is not a {base.__name__}"


def _points(group: str, name: str) -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # takes a hundredth of a second, and few need it

    return tuple(entry_points(group=group, name=name))
