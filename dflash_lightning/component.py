"""What every strategy component shares: a registered name and plain settings from which it can be made again."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar


class Component:
    """A strategy that a recipe picks by class path and a checkpoint remembers by name.

    A subclass takes only plain settings (numbers, strings, lists, null), keyword-only, and stores each under its own
    name, so that ``type(self)(**self.settings())`` is an equal component. ``name`` registers it within its axis;
    subclasses without a ``name`` of their own are abstract. ``initial`` are the settings that only say how a part
    begins: once its weights are trained or copied, nothing depends on them.
    """

    name: ClassVar[str] = ""
    initial: ClassVar[frozenset[str]] = frozenset()
    registry: ClassVar[dict[str, type[Component]]] = {}

    def __init_subclass__(cls, *, axis: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if axis:
            cls.registry = {}
        elif "name" in cls.__dict__:
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
            ValueError: the name is not registered; import the module that defines it first.
        """
        if name not in cls.registry:
            raise ValueError(
                f"{cls.__name__} {name!r} is not registered. Known: {sorted(cls.registry)}. "
                "A component of your own registers when its module is imported: import it before loading."
            )
        return cls.registry[name](**settings)
