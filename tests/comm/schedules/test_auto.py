"""The choice of an allreduce: by name, or the fastest on the slowest rank and the same for all."""

import ml_dtypes
import numpy as np
import pytest

from pydtnn.comm.schedules import auto
from pydtnn.comm.schedules.auto import Auto, create_allreduce
from pydtnn.comm.wrapper import Wrapper
from tests.comm.communicator_contract import CommunicatorContract, total, whole


@pytest.mark.threads(2, through=lambda comm: Auto(comm, ("vendor", "ring", "recursive_doubling")))
class TestAuto(CommunicatorContract):
    pass


class Told(Auto):
    """Is told how long candidates take, by rank, and keeps count of the trials."""

    def __init__(self, inner, **seconds):
        super().__init__(inner, tuple(seconds))
        self.told = seconds
        self.trials = 0

    def _seconds(self, call, name, array):
        self.trials += 1
        return self.told[name][self.rank]


@pytest.mark.threads(3)
@pytest.mark.mpi(3)
def test_the_fastest_on_its_slowest_rank_is_chosen_by_all(comm):
    # On ranks 0 and 1 alone the ring would be ahead.
    told = Told(comm, vendor=[7, 7, 7], ring=[1, 1, 9], direct=[5, 6, 3])
    x = whole(comm.rank, 1013)
    told.allreduce(x)
    np.testing.assert_array_equal(x, total(comm, 1013))
    [choice] = told.choices
    assert choice.name == "direct"
    assert choice.seconds == {"vendor": 7, "ring": 9, "direct": 6}
    assert (choice.call, choice.dtype, choice.nbytes) == ("allreduce", "float64", 8192)
    assert str(choice).startswith("allreduce of float64 up to 8192 B: direct (direct 6e+03 ms, v")


@pytest.mark.threads(2)
def test_every_size_class_type_and_call_is_measured_once(comm):
    told = Told(comm, vendor=[2, 2], ring=[1, 1])
    for n in (100, 128, 65, 100):  # elements of 4 B: from 257 to 512 B
        told.allreduce(np.ones(n, "float32"))
    assert told.trials == auto.MEASUREMENTS * 2
    told.allreduce(np.ones(129, "float32"))
    told.allreduce(np.ones(100, "int32"))
    told.iallreduce(np.ones(100, "float32")).wait()
    assert told.trials == 4 * auto.MEASUREMENTS * 2
    assert [choice.nbytes for choice in told.choices] == [512, 1024, 512, 512]


@pytest.mark.threads(2)
def test_where_a_turn_takes_long_it_is_the_only_one(comm, monkeypatch):
    monkeypatch.setattr(auto, "MAX_MEASURING_S", 0.0)
    told = Told(comm, vendor=[2, 2], ring=[1, 1])
    told.allreduce(np.ones(3))
    assert (told.trials, told.choices[0].name) == (2, "ring")


@pytest.mark.mpi(2)
def test_what_the_vendor_cannot_sum_is_left_to_schedules(comm):
    chosen = Auto(comm, ("vendor", "ring"))
    x = whole(comm.rank, 53, ml_dtypes.bfloat16)
    chosen.allreduce(x)
    np.testing.assert_array_equal(x, total(comm, 53, ml_dtypes.bfloat16))
    assert list(chosen.choices[0].seconds) == ["ring"]
    with pytest.raises(TypeError, match="cannot reduce elements of type bfloat16"):
        comm.allreduce(x)


@pytest.mark.threads(1, 2)
def test_nothing_is_measured_where_nothing_is_sent(comm):
    chosen = Auto(comm)
    chosen.allreduce(np.ones(0))
    chosen.allreduce(np.ones(5), "max")
    if comm.size == 1:
        chosen.iallreduce(np.ones(5)).wait()
    assert chosen.choices == []


@pytest.mark.threads(2)
def test_an_unknown_name_is_refused_and_groups_choose_for_themselves(comm):
    assert isinstance(create_allreduce("auto", comm).split(0), Auto)
    with pytest.raises(ValueError, match=r"unknown allreduce 'rign'; did you mean 'ring'\?"):
        create_allreduce("rign", Wrapper(comm))
