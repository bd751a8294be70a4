"""An environment of the verifiers library whose reward does what its task says: nothing but break, hang, end the process, or be too much."""

import os
import time
from collections.abc import Iterable

import verifiers.v1 as vf


class UnsteadyData(vf.TaskData):
    does: str


class UnsteadyTask(vf.Task[UnsteadyData, vf.State]):
    @vf.reward
    async def judge(self) -> float:
        """See above."""
        if self.data.does == "breaks":
            raise KeyError("no such answer")
        if self.data.does == "hangs":
            time.sleep(3600)
        if self.data.does == "ends":
            os._exit(3)
        return float(self.data.does)


class Unsteady(vf.Taskset[UnsteadyTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterable[UnsteadyTask]:
        """Tasks without end."""
        while True:
            print("noise on standard output")
            yield UnsteadyTask(UnsteadyData(does="1", name="a task without a question"), self.config.task)


__all__ = ["Unsteady"]
