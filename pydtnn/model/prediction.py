"""Outputs of a model for new samples, raw or normalised."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from pydtnn.data.batch import each, parts
from pydtnn.data.comparison import check_samples
from pydtnn.data.inputs import Inputs
from pydtnn.kernels import Backend
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.layers.base import Shape, StepContext
from pydtnn.model.execution import check_inputs
from pydtnn.utils.collective import collective
from pydtnn.utils.validate import check_int, plain_array

WHO = "Model.predict"


class Predictor(ABC):
    """Base class of `Model`: the methods that predict, and the attributes that they use."""

    backend: Backend
    dtype: np.dtype
    input_shapes: tuple[Shape, ...]
    inputs: Inputs | None
    mesh: Any
    output_shapes: tuple[Shape, ...]

    @property
    def output_shape(self) -> Shape:
        """Shape of the (first) output of one sample."""
        return self.output_shapes[0]

    @abstractmethod
    def forward(self, x: Any, context: StepContext, *, keep: bool = True) -> tuple[Any, list[Any]]:
        """Run every node in order."""

    def predict(
        self,
        x: np.ndarray | tuple[np.ndarray, ...],
        *,
        batch_size: int = 256,
        check_range: bool = True,
    ) -> Any:
        """Run the network on samples, without dropout and with running statistics.

        Parameters
        ----------
        x : ndarray, shape (n, *input_shape), or a tuple of one per input
            Raw uint8 pixels, which are normalised as in training if `inputs` is known, or floats
            that are already normalised; cast to the model's dtype. Lists and tensors of other
            libraries are converted.
        batch_size : int
            Samples per pass.
        check_range : bool
            Whether floats are refused that are far outside the range of `inputs`, such as pixels
            that are not normalised.

        Returns
        -------
        ndarray, shape (n, *output_shape), or a tuple of arrays if the model has several outputs

        Raises
        ------
        ValueError
            If `x` does not have the model's input shape, or is not normalised.
        TypeError
            If it does not contain numbers.
        """
        check_int(WHO, "batch_size", batch_size, at_least=1)
        device = () if self.backend.xp is np else self.backend.xp.ndarray
        inputs = tuple(p if isinstance(p, device) else plain_array(WHO, "x", p) for p in parts(x))
        check_inputs(WHO, inputs, self.input_shapes)
        for number, part in enumerate(inputs):
            self._check_values(number, part, check_range)
        self._compare_ranks(inputs)
        context = StepContext(training=False)
        samples = len(inputs[0])
        dtype = arithmetic(self.dtype)
        outputs = [np.empty((samples, *shape), dtype) for shape in self.output_shapes]
        for start in range(0, samples, batch_size):
            rows = slice(start, start + batch_size)
            batch = tuple(self._normalized(k, part[rows]) for k, part in enumerate(inputs))
            y, _ = self.forward(batch, context, keep=False)
            for output, part in zip(outputs, parts(y), strict=True):
                output[rows] = self.backend.to_numpy(part)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def predict_classes(self, x: Any, *, labels: bool = False, **options: Any) -> Any:
        """Return the class with the largest output for each sample; 1 or 0 for a single output.

        A model that was trained on labels that are independent of each other predicts each whose
        output is above 0.

        Parameters
        ----------
        x, **options
            See `predict`.
        labels : bool
            Whether to return names of classes instead of numbers.

        Returns
        -------
        ndarray of int64 or str, shape (n,), or a tuple of arrays if the model has several outputs
            With several labels of a sample, 1 or 0 for each of K, shape (n, K), or if names are
            wanted a list of the tuples of names. An output of numbers beside others as predicted.

        Raises
        ------
        ValueError
            As for `predict`, if the model predicts numbers instead of classes, or if the names of
            the classes are not known.
        """
        tasks = self.inputs.tasks if self.inputs is not None else ()
        if {*tasks} == {"numbers"}:
            raise ValueError(
                "Model.predict_classes: expected a model of classes, got one that was trained to "
                "predict numbers; use predict"
            )
        outputs = self.predict(x, **options)
        tasks = tasks or ("",) * len(parts(outputs))
        if not labels:
            return each(_most_likely, outputs, tasks)
        names = self.inputs.class_names if self.inputs is not None else None
        if names is None:
            raise ValueError(
                "Model.predict_classes: the names of the classes are not known; train on a data "
                "set with class_names, or omit labels=True"
            )
        return each(_named, outputs, names if isinstance(outputs, tuple) else [names], tasks)

    def _compare_ranks(self, inputs: tuple[Any, ...]) -> None:
        """Raise AgreedError if ranks that have parts of the network have other samples."""
        for axis in () if self.mesh is None else self.mesh.model_axes:
            group = self.mesh.group(axis)
            with collective(group, WHO):
                check_samples(group, WHO, inputs)

    def _check_values(self, number: int, x: Any, check_range: bool) -> None:
        """Raise an error if it is not known how to normalise pixels, or floats need to be."""
        if x.dtype.kind in "OSUMm":
            raise TypeError(
                f"{WHO}: expected an array of numbers, got {x.dtype}; convert it, as with "
                "x.astype('float32')"
            )
        if x.dtype != np.uint8 and not check_range:
            return
        if self.inputs is not None:
            self.inputs.parts[number].check(WHO, self.backend.to_numpy(x))
        elif x.dtype == np.uint8:
            raise ValueError(
                f"{WHO}: expected normalised floats, as the model does not know how its pixels are "
                "normalised, got uint8; train it with Trainer.fit or load it with pydtnn.load, or "
                "pass train.normalize(x) of its training set"
            )

    def _normalized(self, number: int, x: Any) -> Any:
        """Return samples of one input as the layers receive them."""
        if self.inputs is not None and x.dtype == np.uint8:
            x = self.inputs.parts[number].normalize(self.backend.to_numpy(x), self.dtype)
        return self.backend.asarray(x, self.dtype)


def _named(scores: np.ndarray, names: tuple[str, ...] | None, task: str) -> Any:
    """Return the names of the most likely classes; their numbers if there are no names."""
    predicted = _most_likely(scores, task)
    if names is None or task == "numbers":
        return predicted
    count = max(scores.shape[-1], 2)
    if len(names) != count:
        raise ValueError(
            f"Model.predict_classes: expected a name for each of the {count} classes of an output, "
            f"got {len(names)}; omit labels=True"
        )
    if task == "labels" and scores.shape[-1] > 1:
        return [tuple(np.array(names)[row > 0].tolist()) for row in predicted]
    return np.array(names)[predicted]


def _most_likely(scores: np.ndarray, task: str) -> np.ndarray:
    """Return the class of the largest score; of one score, class 1 if it is above 0."""
    if task == "numbers":
        return scores
    if task == "labels" and scores.shape[-1] > 1:
        return (scores > 0).astype(np.int64)
    if scores.ndim == 2 and scores.shape[1] == 1:
        return (scores[:, 0] > 0).astype(np.int64)
    return scores.argmax(axis=-1)
