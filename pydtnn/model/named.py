"""Parameters and layers of a model, which are found by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, overload

from pydtnn.layers.base import Layer
from pydtnn.layers.parameters import Parameter
from pydtnn.utils.errors import MissingNameError
from pydtnn.utils.names import unknown


class Parameters(dict[str, Parameter]):
    """A model's parameters by name."""

    def __missing__(self, name: str) -> Parameter:
        raise MissingNameError(unknown("parameter", str(name), self))

    if not TYPE_CHECKING:

        def __call__(self) -> NoReturn:
            raise TypeError(
                "Model.parameters: is a dict and cannot be called; use model.parameters.values(), "
                "or items() for names, too"
            )


class Layers(list[Layer]):
    """A model's layers in the order they run; ``layers["linear0"]`` is that of a name."""

    @overload
    def __getitem__(self, index: SupportsIndex | str) -> Layer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, str):
            return super().__getitem__(index)
        found = {layer.name: layer for layer in self}
        if index not in found:
            raise MissingNameError(unknown("layer", index, map(str, found)))
        return found[index]
