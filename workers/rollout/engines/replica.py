"""Which devices this worker's replica has, and the servers on them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from workers.config import ClusterKind, Config, ConfigError, Server
from workers.rollout.engines.servers.devices import ALL, of_job, of_replica, of_server
from workers.rollout.engines.servers.process import ServerProcess
from workers.rollout.engines.servers.spread_server import Nodes, SpreadServer
from workers.run.folder import RunFolder
from workers.run.processes import GPUS
from workers.slurm.termination import slurm_job

CPU = "cpu"


def spawner(run: RunFolder, config: Config, nodes: Nodes) -> Callable[[int], ServerProcess]:
    """What makes the process of one server of this replica, by its number; `nodes`: the replica's others. Raises `ConfigError` where it has not got
    the GPUs it should."""
    devices, unit = local_devices(run, config, nodes.number), config.engine.parallel.unit
    name = slurm_job() or str(os.getpid())

    def spawn(server: int) -> ServerProcess:
        log = run.jobs / (f"engine-{name}.{server}.log" if config.num_servers > 1 else f"engine-{name}.log")
        tells = config.replayed is not None
        visible = None if devices is None else of_server(devices, server, unit)
        if nodes.number > 1:
            return SpreadServer(nodes, config.engine, Path(config.model.path), log, visible, tells)
        return ServerProcess(config.engine, Path(config.model.path), log, visible, tells_routing=tells)

    return spawn


def local_devices(run: RunFolder, config: Config, num_nodes: int) -> list[str] | None:
    """The GPUs of this replica on this one of its nodes; None where its servers run on CPUs. Raises `ConfigError` where there are fewer."""
    if config.engine.server is not Server.sglang or config.engine.device == CPU:
        return None
    if config.cluster.kind is ClusterKind.slurm:
        return of_job(os.environ.get("CUDA_VISIBLE_DEVICES"), config.allocation.replica_size // num_nodes)
    return of_replica(os.environ.get(GPUS, ALL), _claim(run, config), config.allocation)


def _claim(run: RunFolder, config: Config) -> int:
    """The number of this replica on this machine, which is its own as long as this process lives."""
    for number in range(config.allocation.num_devices // config.allocation.replica_size):
        lock = os.open(run.jobs / f"replica-{number}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return number
    raise ConfigError(f"allocation.num_devices={config.allocation.num_devices}: more replicas run on this machine than it has devices for. "
                      "End what is left of an earlier attempt")
