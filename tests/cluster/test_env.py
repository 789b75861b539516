"""Where a rank's numbers come from."""

import pytest

from aligner.cluster.env import LAUNCHED, RankEnv, first_host, rank_env
from aligner.errors import ConfigError

TORCH = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "9",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
OPENMPI = {
    f"OMPI_COMM_WORLD_{k}": v for k, v in {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items()
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("environ", "launcher"), [(TORCH, "torch"), (SLURM, "slurm"), (OPENMPI, "openmpi"), (PMI, "pmi")]
)
def test_each_launcher_gives_the_same_numbers(environ, launcher):
    env = rank_env(environ)
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (5, 1, 8, 4)
    assert env.launcher == launcher


def test_ranks_are_on_one_host_only_where_the_launcher_says_so():
    """Without a word about it, ranks elsewhere would look for rank 0 on their own loopback."""
    first = SLURM | {"SLURM_NODEID": "0"}
    for environ, name in ((TORCH, "LOCAL_WORLD_SIZE"), (first, "SLURM_TASKS_PER_NODE"), (PMI, "MPI_LOCALNRANKS")):
        silent = {key: value for key, value in environ.items() if key != name}
        assert not rank_env(environ).one_host and not rank_env(silent).one_host
        assert rank_env({**environ, name: "8", "MPI_LOCALRANKID": "5"}).one_host
    assert not rank_env({}).one_host


def test_no_launcher_is_one_rank():
    assert rank_env({}) == RankEnv()
    assert RankEnv().world_size == 1


def test_slurm_finds_the_first_host_and_one_port_per_step():
    env = rank_env(SLURM)
    assert env.master_addr == "gpu07" and 20000 <= env.master_port < 30000
    assert rank_env({**SLURM, "SLURM_PROCID": "0"}).master_port == env.master_port
    assert rank_env({**SLURM, "SLURM_STEP_ID": "1"}).master_port != env.master_port
    assert rank_env({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "3"}).master_addr == "x"
    uneven = {**SLURM, "SLURM_TASKS_PER_NODE": "3,5", "SLURM_LOCALID": "2"}
    assert rank_env(uneven).local_world_size == 5


def test_in_a_heterogeneous_step_lists_are_in_the_order_of_names_and_ranks_in_that_of_components():
    """As Slurm 22.05 told a task of two on n4, the first component, beside n1 and n2 with one each."""
    step = SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "0"}
    step |= {"SLURM_HET_SIZE": "2", "SLURM_GTIDS": "0,1", "SLURM_STEP_TASKS_PER_NODE": "1(x2),2"}
    step |= {"SLURM_STEP_NODELIST": "n[1-2,4]", "SLURM_JOB_NODELIST_HET_GROUP_0": "n4"}
    env = rank_env(step)
    assert (env.rank, env.local_rank, env.world_size, env.local_world_size) == (1, 1, 4, 2)
    assert env.master_addr == "n4" and not env.one_host


def test_a_batch_script_is_no_rank():
    script = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    assert rank_env(script).world_size == 1


@pytest.mark.parametrize(
    ("nodes", "host"), [("a", "a"), ("a,b", "a"), ("gpu[07-09,12],x", "gpu07"), ("r[1-2]-n", "r1-n"), ("x,r[1-2]", "x")]
)
def test_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({**TORCH, **SLURM, "SLURM_NTASKS": "16"}, ("WORLD_SIZE='8'", "SLURM_NTASKS=16")),
        ({**TORCH, **SLURM, "SLURM_PROCID": "4"}, ("RANK='5'", "SLURM_PROCID=4")),
        ({**TORCH, **OPENMPI, "OMPI_COMM_WORLD_SIZE": "2"}, ("WORLD_SIZE='8'", "OMPI_COMM_WORLD_SIZE=2")),
        ({**SLURM, **PMI, "PMI_RANK": "3"}, ("SLURM_PROCID='5'", "PMI_RANK=3")),
        ({"RANK": "0"}, ("WORLD_SIZE=None", "RANK=0")),
        ({"WORLD_SIZE": "2"}, ("RANK=None", "WORLD_SIZE=2")),
        ({**TORCH, "RANK": "x"}, ("RANK='x'", "number")),
        ({**TORCH, "RANK": "8"}, ("RANK=8", "0 to 7")),
        ({**TORCH, "LOCAL_RANK": "4"}, ("LOCAL_RANK=4", "0 to 3")),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "four"}, ("SLURM_TASKS_PER_NODE='four'", "2(x3),1")),
        ({**SLURM, "SLURM_TASKS_PER_NODE": ""}, ("SLURM_TASKS_PER_NODE=''", "at least 2 counts", "SLURM_NODEID=1")),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8"}, ("SLURM_STEP_TASKS_PER_NODE='8'", "SLURM_NODEID=1")),
    ],
)
def test_contradictions_and_gaps_are_named(environ, named):
    with pytest.raises(ConfigError) as caught:
        rank_env(environ)
    assert all(text in str(caught.value) for text in named)


def test_a_launcher_inside_a_step_counts_for_itself():
    outer = {**SLURM, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    assert rank_env({**TORCH, **outer, LAUNCHED: "1"}).rank == 5
    assert rank_env({**TORCH, **outer, "TORCHELASTIC_RUN_ID": "none"}).rank == 5
    assert rank_env({**OPENMPI, **outer}).launcher == "openmpi"
    one_task = {**outer, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    assert rank_env({**TORCH, **one_task}).world_size == 8
    assert rank_env({**TORCH, **SLURM}).launcher == "torch"
