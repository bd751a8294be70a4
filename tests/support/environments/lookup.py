"""An environment of the verifiers library, with a tool: the model must look a word up, and answer with what it is told."""

from collections.abc import Iterable

import verifiers.v1 as vf

WORDS = {"sea": "mer", "sun": "soleil"}


class Dictionary(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "dictionary"

    @vf.tool
    async def look_up(self, word: str) -> str:
        """What the word is in French."""
        return WORDS.get(word, "unknown")


class WordTask(vf.Task[vf.TaskData, vf.State]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """The dictionary, started for each episode."""
        return [Dictionary(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the translation was said, after it had been looked up."""
        looked_up = any(message.role == "tool" for message in trace.messages)
        return float(looked_up and WORDS[self.data.prompt_text] in trace.last_reply)


class Words(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self) -> Iterable[WordTask]:
        """A task for each word."""
        for word in WORDS:
            yield WordTask(vf.TaskData(prompt=word), self.config.task)


__all__ = ["Words"]

if __name__ == "__main__":
    Dictionary.run()
