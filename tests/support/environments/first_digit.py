"""An environment of the verifiers library, of one turn: the reward is the share of the question's first digit in the answer, times `scale`."""

from collections.abc import Iterable

import verifiers.v1 as vf


class DigitData(vf.TaskData):
    digit: str


class DigitConfig(vf.TaskConfig):
    scale: float = 1.0


class DigitTask(vf.Task[DigitData, vf.State, DigitConfig]):
    @vf.reward
    async def share(self, trace: vf.Trace) -> float:
        """Of the digit."""
        said = trace.last_reply
        return self.config.scale * said.count(self.data.digit) / len(said) if said else 0.0


class DigitsConfig(vf.TasksetConfig):
    task: DigitConfig = DigitConfig()
    num_tasks: int = 100


class Digits(vf.Taskset[DigitTask, DigitsConfig]):
    def load(self) -> Iterable[DigitTask]:
        """The numbers from 0, two digits each."""
        for number in range(self.config.num_tasks):
            yield DigitTask(DigitData(prompt=f"{number:02}=", digit=f"{number:02}"[0]), self.config.task)


__all__ = ["Digits"]
