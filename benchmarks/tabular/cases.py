"""Trains all cases, in processes of their own, and compares each with its like on fresh samples."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.tabular.comparison import cost, holm
from benchmarks.tabular.objectives import Method, method
from benchmarks.tabular.study import Course, Setting, train
from launcher.config.schema import register

Case = tuple[str, Setting]


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
        fresh = courses[name, next(other for method, other in courses if method == name and other.eta == 0 and other.lr == setting.lr)]
        end = setting.num_steps // 10
        over = cost(fresh.success.mean(0), course.success.mean(0))
        last = cost(fresh.success[-end:].mean(0), course.success[-end:].mean(0))
        costs.append((over, last))
        half = setting.num_steps // 4
        found.append({"method": name, **asdict(setting), "end": float(course.success[-end:].mean()), "gap": float(course.gap[half:].mean()),
                      "ess": float(course.ess[half:].mean()), "over": asdict(over), "last": asdict(last)})
    old = [index for index, case in enumerate(found) if case["eta"]]
    fallen = holm([each.p for index in old for each in costs[index]])
    for place, index in enumerate(old):
        for which, name in enumerate(("over", "last")):
            found[index][name]["worse"] = fallen[2 * place + which] and costs[index][which].difference < 0
    return sorted(found, key=lambda case: (case["lr"], case["method"], case["spread"], case["eta"]))
