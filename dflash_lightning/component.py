"""What every strategy component shares: a registered name and plain settings from which it can be made again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any, ClassVar


class Component:
    """A strategy that a recipe picks by class path and a checkpoint remembers by name.

    A subclass takes only plain settings (numbers, strings, lists, null), keyword-only, and stores each under its own
    name, so that ``type(self)(**self.settings())`` is an equal component. ``name`` registers it within its axis;
    subclasses without a ``name`` of their own are abstract. ``initial`` are the settings that only say how a part
    begins: once its weights are trained or copied, nothing depends on them.

    ``former`` says of names that an earlier contract of the axis had (a method or attribute, or ``method.argument``)
    what stands in their place. A class that still has one is refused when it is defined, and so is a method that does
    not take what the axis passes to it.
    """

    name: ClassVar[str] = ""
    initial: ClassVar[frozenset[str]] = frozenset()
    registry: ClassVar[dict[str, type[Component]]] = {}
    former: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, *, axis: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if axis:
            cls.registry = {}
            return
        _check_contract(cls)
        if "name" in cls.__dict__:
            known = cls.registry.get(cls.name)
            assert known is None or known.__qualname__ == cls.__qualname__, f"{cls.name!r} names both {known} and {cls}"
            cls.registry[cls.name] = cls

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, as given."""
        parameters = inspect.signature(type(self).__init__).parameters.values()
        return {p.name: getattr(self, p.name) for p in parameters if p.kind is p.KEYWORD_ONLY}

    @classmethod
    def from_settings(cls, name: str, settings: dict[str, Any]) -> Any:
        """The component registered as ``name`` within this axis, made from ``settings``.

        Raises:
            ValueError: the name is not registered (import the module that defines it first), or the settings are not
                those of the component.
        """
        if name not in cls.registry:
            raise ValueError(
                f"{cls.__name__} {name!r} is not registered. Known: {sorted(cls.registry)}. "
                "A component of your own registers when its module is imported: import it before loading."
            )
        try:
            return cls.registry[name](**settings)
        except TypeError as error:  # a setting that it does not take, one that is missing, or a value of another kind
            raise ValueError(
                f"{cls.__name__} {name!r} cannot be made of the settings {settings!r:.200} ({error}). "
                "The file is damaged, or of another version of the component."
            ) from error


def _check_contract(cls: type[Component]) -> None:
    """Refuse a class that is written for another contract than its axis has.

    Raises:
        TypeError: it has a name that is gone, or a method that cannot be called as those of the axis are.
    """
    for name, own in vars(cls).items():
        if name in cls.former:
            raise TypeError(f"{cls.__name__}.{name} is no part of the contract any more: {cls.former[name]}")
        if not isinstance(own, FunctionType):
            continue
        taken = list(inspect.signature(own).parameters)
        for argument in taken:
            if f"{name}.{argument}" in cls.former:
                why = cls.former[f"{name}.{argument}"]
                raise TypeError(f"{cls.__name__}.{name} is given no {argument!r} any more: {why}")
        wanted = _of_the_axis(cls, name)
        if wanted is not None and not _takes(own, wanted):
            raise TypeError(
                f"{cls.__name__}.{name}({', '.join(taken)}) does not take what it is given. "
                f"Write it as {name}({', '.join(inspect.signature(wanted).parameters)})"
            )


def _of_the_axis(cls: type[Component], name: str) -> FunctionType | None:
    """The method ``name`` as the base class of the axis defines it; null where that has none."""
    if name.startswith("__"):
        return None
    found = [vars(base)[name] for base in cls.__mro__[1:] if issubclass(base, Component) and name in vars(base)]
    return found[-1] if found and isinstance(found[-1], FunctionType) else None


def _takes(own: FunctionType, wanted: FunctionType) -> bool:
    """Whether ``own`` can be called with all arguments of ``wanted``, passed as that one takes them."""
    given = inspect.signature(wanted).parameters.values()
    try:
        inspect.signature(own).bind(
            *[p.name for p in given if p.kind is not p.KEYWORD_ONLY],
            **{p.name: p for p in given if p.kind is p.KEYWORD_ONLY},
        )
    except TypeError:
        return False
    return True
