"""Trains all cases, in processes of their own, and compares each with its like on fresh samples."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.tabular.comparison import cost, holm
from benchmarks.tabular.objectives import Method, method
from benchmarks.tabular.study import Course, Setting, train
from launcher.config.schema import register

Case = tuple[str, Setting]
NAMES = ("over", "last", "apart")
"""What is compared with fresh samples: success over the whole course, at its end, and at its end with what these had come to eta steps before."""
AXES: dict[str, list[float]] = {"lr": [0.01, 0.1], "groups": [2, 32], "samples": [4, 16], "length": [3, 7], "mismatch": []}
"""What else is changed, one at a time; the mismatch, of all methods, in __main__.py."""


def begin() -> None:
    """Of every process."""
    torch.set_num_threads(1)
    register()


def _play(case: Case) -> tuple[Case, Course]:
    name, setting = case
    found = method(name)
    assert isinstance(found, Method), found
    return case, train(found, setting)


def learned(cases: list[Case], processes: int) -> list[dict[str, Any]]:
    """Train all, and compare each with its like on fresh samples."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), begin) as pool:
        courses = dict(pool.map(_play, cases))
    found, costs = [], []
    for (name, setting), course in courses.items():
        fresh = courses[name, fresh_of(setting)]
        end, late = setting.num_steps // 10, setting.num_steps - setting.eta
        over = cost(fresh.success.mean(0), course.success.mean(0))
        last = cost(fresh.success[-end:].mean(0), course.success[-end:].mean(0))
        apart = cost(fresh.success[late - end:late].mean(0), course.success[-end:].mean(0))
        costs.append((over, last, apart))
        half = setting.num_steps // 4
        found.append({"method": name, **asdict(setting), "fresh": setting == fresh_of(setting),
                      "end": float(course.success[-end:].mean()), "gap": float(course.gap[half:].mean()),
                      "ess": float(course.ess[half:].mean()), "over": asdict(over), "last": asdict(last), "apart": asdict(apart)})
    old = [index for index, case in enumerate(found) if not case["fresh"]]
    fallen = holm([each.p for index in old for each in costs[index]])
    for place, index in enumerate(old):
        for which, name in enumerate(NAMES):
            found[index][name]["worse"] = fallen[len(NAMES) * place + which] and costs[index][which].difference < 0
    return sorted(found, key=lambda case: (case["method"], case["gap"]))


def fresh_of(setting: Setting) -> Setting:
    """The same with fresh samples of the very policy that is in training."""
    return replace(setting, eta=0, spread=False, mismatch=0.0)


def along_axes(base: Setting, etas: list[int]) -> list[Setting]:
    """The base, and from it one thing changed at a time, with each of `etas`, and with fresh samples."""
    changes: list[dict[str, Any]] = [{name: value} for name, values in AXES.items() for value in values]
    changed = [replace(base, **change) for change in [{}, *changes]]
    return [setting for each in changed for setting in (fresh_of(each), *(replace(each, eta=eta) for eta in etas))]
