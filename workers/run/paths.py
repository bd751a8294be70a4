"""The paths of a run, in one class: what stands in its folder, what writes it, and where its weights lie as files.

    run folder (0700)
      config.json            the composed config, as the workers read it       launcher
      config.yaml            the same, for people                              launcher
      jobs.json              submitted jobs                                     launcher
      jobs/                  submitit's files and the logs of every job         submitit
      processes/             the processes of the run on this machine           every process
      keys/                  CURVE keys (0600)                                  workers/transport/keys.py
      model/                 the starting model, where it was made on the spot  workers/prepare.py
      environment.jsonl      the tasks of workflow.env, as a data set           workers/prepare.py
      epochs/000001          claimed by one incarnation of the trainer each     trainer
      epochs/000001.end      how that incarnation ended                         trainer
      rendezvous/            where the coordinator of an epoch listens          coordinator
      checkpoints/7.120/     the state after step 120, complete or not there    trainer, coordinator
      partials/              groups that workers could not hand over            rollout workers
      journal/               inputs of the coordinator, for headway replay      coordinator
      status.json            what every part is doing now                       coordinator
      metrics.jsonl          one line a training step; tensorboard/ the same    coordinator
      evaluations.jsonl      one line an evaluation                             coordinator
      rollouts/              groups that are kept to be read, as Parquet       coordinator
      rollouts.html          a page of them                                    launcher
      heldout_samples.jsonl  answers to some held-out prompts, a line an evaluation  coordinator
      consumed.jsonl         which prompts each training step has consumed      coordinator
      tracking/              what trackers have been told; W&B's and MLflow's files  workers/tracking
      outcome.json           why the run ended; the first writer wins           anyone
      outcome.1.json         why it had ended before it was resumed             launcher
      exports/120/           the model after step 120, a Hugging Face folder    trainer
      final_model/           the trained model, a Hugging Face folder           trainer
      final_adapter/         its adapters alone, a PEFT folder                  trainer
      summary.json           the figures of the whole run                       coordinator
      report.html            the run as a page, at its end                      coordinator, launcher
      trace.json.gz          what happened when, by `headway trace`            launcher
      weights/               weights as files, where workers read them as such  trainer
      evaluation/            what an evaluation alone has judged so far         workers/evaluation/chunks.py
      evaluation.json        its figures; samples.jsonl: every answer, judged   workers/evaluation/result.py
      stop                   its presence asks the run to end                   launcher
      reserve                room for the outcome, should the disk be full      launcher
      launcher.lock          held by the launcher while it stays attached       launcher
      supervisor.lock        held by the `headway watch` that keeps the run     launcher
      keeper.json            which that is, said every few seconds              launcher
      excluded.json          nodes that it leaves out, and why                  launcher
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Entry:
    """A file or folder in the run folder, as an attribute of `RunPaths`: its path."""

    name: str

    def __get__(self, run: RunPaths, owner: type[RunPaths]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunPaths:
    """The paths of the run in the folder `path`. What each is: the drawing above."""

    path: Path

    reserve = Entry("reserve")
    config = Entry("config.json")
    config_yaml = Entry("config.yaml")
    submitted = Entry("jobs.json")
    jobs = Entry("jobs")
    processes = Entry("processes")
    keys = Entry("keys")
    model = Entry("model")
    environment_tasks = Entry("environment.jsonl")
    epochs = Entry("epochs")
    checkpoints = Entry("checkpoints")
    partials = Entry("partials")
    consumed = Entry("consumed.jsonl")
    rendezvous = Entry("rendezvous")
    journal = Entry("journal")
    status = Entry("status.json")
    metrics = Entry("metrics.jsonl")
    evaluations = Entry("evaluations.jsonl")
    evaluation = Entry("evaluation")
    evaluation_result = Entry("evaluation.json")
    samples = Entry("samples.jsonl")
    rollouts = Entry("rollouts")
    rollouts_page = Entry("rollouts.html")
    heldout_samples = Entry("heldout_samples.jsonl")
    tensorboard = Entry("tensorboard")
    tracking = Entry("tracking")
    outcome = Entry("outcome.json")
    summary = Entry("summary.json")
    report = Entry("report.html")
    trace = Entry("trace.json.gz")
    exports = Entry("exports")
    final_model = Entry("final_model")
    final_adapter = Entry("final_adapter")
    stop = Entry("stop")
    launcher_lock = Entry("launcher.lock")
    supervisor_lock = Entry("supervisor.lock")
    keeper = Entry("keeper.json")
    excluded = Entry("excluded.json")

    def weights(self, where: str) -> Path:
        """The folder of published weights for `weights.dir`: memory-backed ('auto'), in here ('run'), or below a given folder."""
        if where == "run":
            return self.path / "weights"
        parent = (MEMORY if MEMORY.is_dir() else self.path) if where == "auto" else Path(where)
        return parent / f"headway-{os.getuid()}-{hashlib.sha256(str(self.path).encode()).hexdigest()[:16]}"

    def store(self, where: str) -> Path:
        """The root of this node's store (workers/weights/store.py) for `weights.dir`. On storage that nodes may share, each has its own."""
        if where == "auto" and MEMORY.is_dir():
            return self.weights(where)
        parent = self.path if where in ("auto", "run") else Path(where)
        return parent / f"headway-{os.getuid()}-{hashlib.sha256(f'{self.path}@{socket.gethostname()}'.encode()).hexdigest()[:16]}"

    def merged(self, where: str) -> Path:
        """The root of the store of versions that this node has merged itself (weights.adapter_only)."""
        store = self.store(where)
        return store.with_name(f"{store.name}-merged")
