"""Tests that start Ray, which asks outside addresses: `test_rollouts_ray.py` runs this file where there is only loopback."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from sequencematch.policy import Sampling
from sequencematch.training.rollouts import pool as pools
from sequencematch.training.rollouts.copies import Blueprint
from sequencematch.training.rollouts.on_ray import RayEngine
from sequencematch.training.rollouts.pool import Failed, Pool, RolloutWorkerError
from sequencematch.training.rollouts.weights import Layout
from sequencematch.training.rollouts.worker import Setup
from tests.training import processes_run
from tests.training.processes_run import STEPS, WITH_WORKER, name_of, worker_name
from tests.training.rollout_runs import Outcome, process_of, run, signal_one, total
from tests.training.test_processes import ROOT, check_same

#: One worker and weights of the current step: such a run must equal the inline one, whatever happens to the worker.
EXACT: dict[str, Any] = {"rollouts": "ray", "max_staleness": 0}


@cache
def inline(folder: Path, *, lora: bool = False) -> Outcome:
    return run(folder, lora=lora)[0]


@pytest.fixture(scope="module", autouse=True)
def alone() -> None:
    """Nothing but loopback."""
    assert [name for _, name in socket.if_nameindex()] == ["lo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inline")


def test_a_local_cluster_is_started_and_stopped_and_the_run_equals_inline(tmp_path: Path, folder: Path) -> None:
    """Bit for bit, with LoRA under autocast to bfloat16."""
    assert not ray.is_initialized()
    found, _ = run(tmp_path, lora=True, **EXACT)
    assert found.equals(inline(folder, lora=True))
    assert not ray.is_initialized()


def test_two_and_three_processes_that_share_an_actor_equal_one_without(tmp_path: Path) -> None:
    """Twenty steps with DDP and FSDP2, up to rounding."""
    alone = processes_run.train_all(tmp_path, 1)
    with (tmp_path / "log.txt").open("w") as log:
        command, own = processes_run.launched_command(tmp_path, "ray"), {"GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, cwd=ROOT, env=os.environ | own, stdout=log, stderr=log, check=False)
    assert done.returncode == 0, (tmp_path / "log.txt").read_text()[-10_000:]
    found, _ = processes_run.found_in(tmp_path)
    assert found.keys() == {worker_name(case, "ray") for case in WITH_WORKER}
    for case in WITH_WORKER:
        result = found[worker_name(case, "ray")]
        assert (result.processes, result.sharded, len(result.losses)) == (case[0], case[1] != "ddp", STEPS)
        check_same(result, alone[name_of(1, "alone", case[2])])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A machine without room for workers, to which the test is connected, and two more that it adds."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    made.shutdown()


def test_a_killed_and_a_hung_actor_change_nothing(tmp_path: Path, folder: Path, cluster: Cluster) -> None:
    """Bit for bit. The trainer connects to a cluster by its address, and disconnects in the end."""
    node = cluster.add_node(num_cpus=1)
    counts, hit = [], set[int]()
    faults = {
        4: signal_one(signal.SIGKILL, hit),
        8: signal_one(signal.SIGSTOP, hit),
        12: lambda pool: counts.append((pool.counts.received, pool.reported)),
    }
    found, trainer = run(tmp_path, faults, **EXACT, ray_address=cluster.address, rollout_timeout_s=5)
    cluster.remove_node(node)
    assert found.equals(inline(folder))
    assert counts == [(24, 24)]
    assert total(trainer, "rollouts/replaced") >= 2
    assert total(trainer, "rollouts/duplicates") == 0
    assert not ray.is_initialized()


def test_a_node_may_be_removed_and_another_one_added(
    tmp_path: Path, folder: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker is lost with its machine. Training says that there is none, waits, and goes on when a machine comes."""
    monkeypatch.setattr(pools, "SAY_EVERY_S", 1.0)
    nodes = [cluster.add_node(num_cpus=1)]

    def remove(pool: Pool) -> None:
        process_of(pool)
        cluster.remove_node(nodes.pop())
        warn = pools.logger.warning

        def warned(message: str, *values: Any) -> None:
            warn(message, *values)
            if message.startswith("There is no rollout worker") and not nodes:
                nodes.append(cluster.add_node(num_cpus=1))

        monkeypatch.setattr(pools.logger, "warning", warned)

    found, trainer = run(tmp_path, {5: remove}, **EXACT, ray_address=cluster.address)
    cluster.remove_node(nodes.pop())
    assert found.equals(inline(folder))
    assert "There is no rollout worker: training waits. 1 of 1 are starting or wait for room" in caplog.text
    assert total(trainer, "rollouts/replaced") >= 1


def test_an_actor_that_can_not_start_says_why(cluster: Cluster) -> None:
    """It has failed, and was not killed: the run would end with the error, and not try for ever."""
    node = cluster.add_node(num_cpus=1)
    engine = RayEngine(cluster.address, workers=1, cpus=1, gpus=0.0)
    nothing = Layout.of([])
    frozen = engine.publish(engine.block(8))
    engine.begin(Setup(Blueprint(b"no policy", (), nothing, nothing), Sampling(), "cpu", 1, "highest"), frozen)
    engine.launch(1)
    (event,) = engine.events(120)
    engine.stop()
    cluster.remove_node(node)
    assert isinstance(event, Failed)
    assert "UnpicklingError" in event.error.strip().splitlines()[-1]


def test_a_cluster_without_room_fails_the_run_if_that_is_asked_for(tmp_path: Path, cluster: Cluster) -> None:
    with pytest.raises(RolloutWorkerError, match="1 of 1 are starting or wait for room in the cluster"):
        run(tmp_path, **EXACT, ray_address=cluster.address, rollout_timeout_s=2, rollout_without_workers="fail")
    assert not ray.is_initialized()
