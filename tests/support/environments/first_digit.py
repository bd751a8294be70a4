"""An environment of the verifiers library, of one turn: the reward is how near the answer's digits are to the question's first, times `scale`."""

from collections.abc import Iterable

import verifiers.v1 as vf


class DigitData(vf.TaskData):
    digit: str


class DigitConfig(vf.TaskConfig):
    scale: float = 1.0


class DigitTask(vf.Task[DigitData, vf.State, DigitConfig]):
    @vf.reward
    async def nearness(self, trace: vf.Trace) -> float:
        """1 for the digit itself, 0 for what is none."""
        said = trace.last_reply
        nearness = [1 - abs(int(self.data.digit) - int(character)) / 9 if character.isdecimal() else 0.0 for character in said]
        return self.config.scale * sum(nearness) / len(said) if said else 0.0


class DigitsConfig(vf.TasksetConfig):
    task: DigitConfig = DigitConfig()
    num_tasks: int = 100


class Digits(vf.Taskset[DigitTask, DigitsConfig]):
    def load(self) -> Iterable[DigitTask]:
        """The numbers from 0, two digits each."""
        for number in range(self.config.num_tasks):
            yield DigitTask(DigitData(prompt=f"{number:02}=", digit=f"{number:02}"[0]), self.config.task)


__all__ = ["Digits"]
