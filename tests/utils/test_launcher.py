"""How many ranks the launcher says are on this host."""

import pytest

from pydtnn.utils.launcher import _LOCAL_SIZES, _SIZE_VARIABLES, is_first_on_host, local_ranks
from tests.each import each

SLURM = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_LOCALID")
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*_SIZE_VARIABLES, *_LOCAL_SIZES, *SLURM, *LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)


def test_a_process_by_itself_is_alone_on_its_host():
    assert local_ranks() == 1
    assert is_first_on_host()


@each("text", ["0", "abc", "-2", "1.5", "\u00b2"])
@each("name", _LOCAL_SIZES)
def test_a_number_that_is_none_is_refused_by_its_name(name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"^{name}: expected a positive number"):
        local_ranks()


@each(
    ("tasks", "node", "ranks"),
    [("4", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("1,2,3", 2, 3), ("8(x128)", 127, 8)],
)
def test_tasks_of_slurm_are_counted_node_by_node(tasks, node, ranks, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "99")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    monkeypatch.setenv("SLURM_NODEID", str(node))
    assert local_ranks() == ranks


@each("tasks", ["", "many", "4(x2", "3,0"])
def test_where_slurm_does_not_say_all_ranks_might_be_here(tasks, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "6")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert local_ranks() == 6


def test_mpirun_inside_an_allocation_knows_better(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1")
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setenv("MPI_LOCALNRANKS", "5")
    assert local_ranks() == 5


@each("name", [*LOCAL_RANKS, "SLURM_LOCALID"])
def test_the_first_rank_of_a_host_knows_it(name, monkeypatch):
    monkeypatch.setenv(name, "0")
    assert is_first_on_host()
    monkeypatch.setenv(name, "1")
    assert not is_first_on_host()
