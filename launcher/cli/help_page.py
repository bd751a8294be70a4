"""What `headway` alone and `headway --help` show: one screen. Imports nothing that takes time."""

from __future__ import annotations

COMMANDS = {
    "run": "start a run (the default: `headway experiment=demo` is the same as `headway run experiment=demo`)",
    "sweep": "one run for each combination of values: headway sweep experiment=demo staleness.eta=0,4",
    "eval": "judge a model on held-out prompts: headway eval greedy evaluation.run=RUN",
    "selftest": "do engine and trainer compute the same log-probs with this config?",
    "plan": "what a config will give: tokens/s, seconds a step, ages, what limits it; --from RUN goes by what a run has measured",
    "config": "groups, options and keys, each with type, default, unit and a line: headway config trainer.lr",
    "runs": "the runs in a folder (default runs/): state, step, held-out score, age",
    "status": "what every part of a run does and waits for, now",
    "watch": "follow a run; on SLURM also keep it going",
    "logs": "the newest log of a part of a run: headway logs RUN train --follow",
    "replay": "what the coordinator was told, once more: does it decide the same, where was it at a time, what moved last",
    "trace": "what happened when, for Perfetto: leases, generation, rewards, weights, batches, training steps",
    "rollouts": "what the models have said: by step, reward, length, text, prompt; --html: a page to look around in",
    "report": "write a page about a run, or a table of a sweep",
    "stop": "end a run in order; --drain saves its state first",
    "resume": "go on with a run that was drained, was stopped, or failed",
}
STARTS = "run", "sweep", "eval", "selftest"
TAKES_KEYS = *STARTS, "plan"
WITH_VALUE = "-c", "--cfg", "-p", "--package", "-cd", "--config-dir"
RUN_FLAGS = {
    "--dry-run": "show the plan and what would be submitted, start nothing",
    "--fake-step": "with --dry-run: memory, operators and exchanges of a training step on a GPU, counted without one",
    "--detach": "return as soon as it is submitted",
    "--plain": "lines instead of the live view",
    "--keep": "keep the folder of a self-test that passed",
}
OF_HYDRA = """\
  --cfg job            print the composed config, and start nothing (--resolve: with what it refers to)
  --config-dir DIR     look for groups' files in this folder too: DIR/cluster/mysite.yaml is cluster=mysite
  --info               how the config is put together"""
COMPLETION = """eval "$(headway --shell-completion install=bash)"      (or zsh, fish: in the shell's start-up file)"""
EXIT = """0 done   1 the run failed or was stopped, or something else did   2 refused: a mistake in what was given; nothing was started"""


def page() -> str:
    """The whole page."""
    commands = "\n".join(f"  {name:<9} {line}" for name, line in COMMANDS.items())
    flags = "\n".join(f"  {name:<11} {line}" for name, line in RUN_FLAGS.items())
    return f"""\
Headway: asynchronous reinforcement learning for language models, on this machine or as SLURM jobs.

usage: headway [COMMAND] [--flags] [GROUP=OPTION ...] [KEY=VALUE ...]      headway COMMAND --help tells more

{commands}

{flags}

examples
  headway experiment=demo                                       a small model learns to add, on two CPU cores
  headway --dry-run cluster=slurm experiment=gsm8k_qwen3_0.6b model.path=/models/Qwen3-0.6B data.path=/datasets/gsm8k
  headway sweep experiment=demo staleness.eta=0,4 trainer.lr=1e-5,2e-5

config keys     headway config          groups' files are in conf/, what they mean in docs/
completion      {COMPLETION}
exit status     {EXIT}
"""
