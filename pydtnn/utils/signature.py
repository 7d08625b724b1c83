"""Signatures of classes with ``__new__``."""

from __future__ import annotations

import inspect


class InitSignature:
    """Class attribute ``__signature__``: the parameters of ``__init__``, as without ``__new__``."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:  # an object that can be called has the signature of its __call__
            raise AttributeError("__signature__")
        if owner.__init__ is object.__init__:  # type: ignore[misc]
            return inspect.Signature()
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])  # without self
