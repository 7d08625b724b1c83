"""What a scheme of a user may leave out or name, and what an abandoned step leaves behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce, abandon
from pydtnn.utils.option import option
from pydtnn.utils.request import Request
from tests.each import each
from tests.parallel.schemes.course import fit, trainer_of
from tests.small_training import small_fit, small_trainer


def test_a_subclass_that_leaves_a_bucket_out_is_told_so_on_every_rank():
    class Some(AllReduce):
        def bucket_ready(self, bucket: Any) -> None:
            if bucket.index != 1:
                super().bucket_ready(bucket)

    def rank(comm: Any) -> str:
        trainer = trainer_of(Some(comm), SGD(0.1))
        with pytest.raises(ValueError, match="Some: expected bucket_ready") as error:
            fit(trainer, 1)
        return str(error.value)

    told = run_threads(3, rank)
    assert all("a message of bucket 1, got none; call super()" in one for one in told)


@pytest.mark.threads(2)
def test_names_of_a_scheme_of_a_user_do_not_collide_with_those_of_the_base_class(comm):
    class Own(AllReduce):
        def __init__(self, comm: Communicator) -> None:
            super().__init__(comm)
            self.pending: dict[int, float] = {}
            self.requests: list[int] = []

        def bucket_ready(self, bucket: Bucket) -> None:
            super().bucket_ready(bucket)
            self.pending[bucket.index] = 1.0

    own, plain = (small_trainer(exchange=scheme(comm)) for scheme in (Own, AllReduce))
    assert small_fit(own) == small_fit(plain)


class Late(AllReduce):
    def start(self, buckets: tuple[Bucket, ...]) -> None:
        super().start(buckets)
        self.update: Any = 0.0


class Class(AllReduce):
    arrays: Any = option(0.5)


@each(("scheme", "name"), [(Late, "update"), (Class, "arrays")])
def test_an_attribute_with_the_name_of_a_method_is_refused(scheme, name):
    words = f"^{scheme.__name__}: {name} is a method of GradientExchange, got an attribute, "
    with pytest.raises(TypeError, match=words):
        small_fit(small_trainer(exchange=scheme(Serial())))


class Late(Request):
    """A message that is complete after `wait`."""

    done = False

    def wait(self) -> None:
        self.done = True

    def test(self) -> bool:
        return self.done


def test_a_state_is_that_after_all_pending_messages():
    exchange, request = AllReduce(Serial()), Late()
    exchange.start(small_trainer().model.buckets)
    exchange.add_request(exchange.buckets[0], request)
    exchange.state()
    assert request.done


def test_what_is_not_finite_after_an_abandoned_step_is_zero():
    average, residual = np.array([1, np.nan, np.inf]), np.array([-np.inf, 2.0])
    sums = SimpleNamespace(arrays=lambda: [("residual", residual)])
    waits, arrays = Mock(), {"average": [average]}
    abandon(Mock(in_flight=waits, _all_sums=[sums], arrays=lambda: arrays))
    waits.wait.assert_called_once()
    assert (average.tolist(), residual.tolist()) == ([1, 0, 0], [0, 2])
