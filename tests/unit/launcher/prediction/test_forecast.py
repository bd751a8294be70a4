"""`headway plan`: known models on known GPUs, other splits, what an earlier run says, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import plan as command
from launcher.config.cluster import GpuRequest
from launcher.config.schema import FullConfig
from launcher.prediction import costs, forecast, words
from launcher.prediction.assumptions import UNITS, usual
from launcher.prediction.costs import Shapes
from launcher.prediction.device_speeds import device
from launcher.prediction.earlier_run import measured
from launcher.share import CONF
from tests.support.documented import MODELS
from workers.config import AllocationConfig, ClusterKind, ConfigError, Device, Dtype, OffPolicy, RunKind, Server
from workers.model.architecture import Architecture

COMMON: dict[str, Any] = {"max_positions": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "eos_token_ids": ()}
QWEN_7B = Architecture("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, tied=False, **COMMON)


def on_gpus(devices: int = 32, **allocation: Any) -> FullConfig:
    """Qwen2.5-7B on H100s, answers of up to 8k tokens."""
    config = FullConfig()
    config.model.path = "/model"
    config.cluster.kind = ClusterKind.slurm
    for part in (config.cluster.train, config.cluster.inference):
        part.time, part.gpus, part.gpu_type = "60", GpuRequest.gres, "h100"
    config.engine.server, config.engine.dtype, config.trainer.dtype = Server.sglang, Dtype.bfloat16, Dtype.bfloat16
    config.engine.context_length, config.workflow.max_new_tokens, config.engine.num_slots = 9000, 8192, 128
    config.trainer.batch_groups, config.workflow.group_size, config.rollout.concurrency = 128, 16, "auto"
    config.allocation = AllocationConfig(devices, **allocation)
    return config


def test_gpus_are_known_by_their_type_and_others_are_taken_for_usual_ones() -> None:
    assert device(True, "nvidia_h200_141gb").said == "h200" and not device(False, "h100").is_gpu
    assert "not known" in device(True, "rtx9000").said and device(True, "").flops == device(True, "h100").flops


def test_a_decoding_step_reads_the_weights_and_a_training_step_computes() -> None:
    config, assumed = on_gpus(), usual(on_gpus())
    shapes, h100 = Shapes.of(QWEN_7B), device(True, "h100")
    fixed, each = costs.decoding(config, shapes, h100, 2000.0, assumed)
    assert shapes.weights.total == pytest.approx(7.6e9, rel=0.01)
    assert fixed == pytest.approx(3e-3 + 15.2e9 / (0.6 * 3.35e12), rel=0.02), "once all weights, at 60% of the bandwidth"
    assert 1e-5 < each < 1e-4
    config.engine.parallel.tp = 2
    assert costs.decoding(config, shapes, h100, 2000.0, assumed)[0] < fixed
    tokens = 128 * (200 + 16 * 2048)
    seconds = costs.training(on_gpus(), shapes, h100, 8, assumed)
    assert seconds == pytest.approx(tokens * 4 * 2 * 7.1e9 / (8 * 0.35 * 989e12), rel=0.15), "forward, backward, and the proximal policy's forward"


def test_a_larger_teacher_takes_longer(tmp_path: Path) -> None:
    shapes, h100, config, assumed = Shapes.of(QWEN_7B), device(True, "h100"), on_gpus(), usual(on_gpus())
    plain = costs.training(config, shapes, h100, 8, assumed)
    config.algorithm.kl_weight = 1.0
    own = costs.training(config, shapes, h100, 8, assumed) - plain
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-32B"]))
    config.algorithm.teacher = str(tmp_path)
    taught = costs.training(config, shapes, h100, 8, assumed) - plain
    assert taught / own == pytest.approx(32.0 / 7.1, rel=0.1)


def test_slots_are_as_many_as_the_cache_has_room_for() -> None:
    config, shapes = on_gpus(), Shapes.of(QWEN_7B)
    assert costs.slots(config, shapes, 79 * 2.0**30, 1000.0) == 128
    config.engine.num_slots = 100_000
    assert 500 < costs.slots(config, shapes, 79 * 2.0**30, 2000.0) < 600, "(0.9 of 79 GiB - 15 GB) / 57 kB a token"
    config.engine.parallel.tp = 4
    each_once = costs.slots(config, shapes, 79 * 2.0**30, 2000.0)
    config.engine.parallel.tp = 8  # of 4 heads
    assert 1.0 < costs.slots(config, shapes, 79 * 2.0**30, 2000.0) / each_once < 1.1, "twice the room, in which all is kept twice"


def test_the_passes_of_a_step_are_those_of_its_objective() -> None:
    config, shapes, h100 = on_gpus(), Shapes.of(QWEN_7B), device(True, "h100")
    config.trainer.num_minibatches = 4

    def passes() -> float:
        computing = costs.training(config, shapes, h100, 8, usual(config)) - costs.updating(config, shapes, h100, 8, usual(config))
        return round(computing / unit, 2)

    unit = 1.0
    config.algorithm.decoupled = False
    unit = passes() / 3
    three = passes()
    config.algorithm.decoupled = True
    decoupled = passes()
    config.algorithm.off_policy = OffPolicy.second_moment
    assert (three, decoupled, passes()) == (3.0, 3.75, 4.0)


def test_local_gpus_are_gpus() -> None:
    config = on_gpus()
    config.cluster.kind, config.trainer.device = ClusterKind.local, Device.cuda
    assert all(found.is_gpu for found in forecast.devices(config, usual(on_gpus())))
    config.engine.server = Server.embedded
    assert [found.is_gpu for found in forecast.devices(config, usual(on_gpus()))] == [False, True]


def test_a_better_split_is_named_and_it_is_better() -> None:
    config = on_gpus(32, inference_fraction=0.25)
    assumed = usual(config)
    now = forecast.of(config, QWEN_7B, assumed).prediction
    (keys, times), *_ = forecast.better(config, QWEN_7B, assumed)
    assert now.limit == "engines" and times > 1.5 and keys.startswith("allocation.inference_fraction=")
    config.allocation.inference_fraction = float(keys.partition("=")[2])
    assert forecast.of(config, QWEN_7B, assumed).prediction.tokens_per_s == pytest.approx(times * now.tokens_per_s)
    assert all("inference_fraction" not in other for other, _ in forecast.better(config, QWEN_7B, assumed))


def test_a_supervised_run_has_no_prediction() -> None:
    config = on_gpus()
    config.run.kind = RunKind.supervised
    with pytest.raises(ConfigError, match="run.kind=.supervised.: has no prediction"):
        forecast.check(config)


# -- an earlier run --------------------------------------------------------------------------------------------------------

def metrics(config: FullConfig, num_steps: int, slower: float) -> list[dict]:
    """Of a run that did what is predicted, with engines and trainer that take `slower` times as long as is assumed."""
    assumed = usual(config).given("mean_tokens", 1000.0).given("engine_factor", slower).given("trainer_factor", slower)
    found = forecast.of(config, QWEN_7B, assumed).prediction
    batch, shapes = forecast.work(config, assumed).tokens, Shapes.of(QWEN_7B)
    train_s = costs.training(config, shapes, device(True, "h100"), config.plan().num_train_devices, assumed)
    replicas = config.plan().num_replicas
    running = found.running * replicas / forecast.work(config, assumed).alive
    return [{"step": step, "seconds": step * found.step_s, "response_tokens": 1000.0, "tokens_generated": batch * step,
             "tokens_trained": batch * step, "num_tokens": batch, "num_packed_tokens": batch + 128 * 300,
             "train_s": train_s, "publish_s": 0.1, "replicas": replicas,
             "running": running, "rollout_idle_s": 0.0, "weight_updates": replicas * step, "weight_update_s": 0.5 * replicas * step}
            for step in range(1, num_steps + 1)]


def test_an_earlier_run_says_lengths_and_speeds_and_they_carry_over_to_another_split() -> None:
    before, steps = on_gpus(32), metrics(on_gpus(32), 12, slower=1.6)
    assumed = forecast.assume(before, QWEN_7B, steps, "runs/before")
    assert (assumed.lengths.mean, assumed.prompt_tokens, assumed.pause_s, assumed.publish_s, assumed.kept) == pytest.approx((1000, 300, 0.5, 0.1, 1))
    assert assumed.trainer_factor == pytest.approx(1.6, rel=0.02) and assumed.engine_factor == pytest.approx(1.6, rel=0.15)
    speed = steps[-1]["tokens_trained"] / steps[-1]["seconds"]
    assert forecast.of(before, QWEN_7B, assumed).prediction.tokens_per_s == pytest.approx(speed, rel=0.15)
    doubled = on_gpus(64)
    doubled.trainer.batch_groups = 256
    assert forecast.of(doubled, QWEN_7B, assumed).prediction.tokens_per_s == pytest.approx(2 * speed, rel=0.15)


def test_totals_of_workers_begin_anew_with_another_training_job() -> None:
    config, steps = on_gpus(32), metrics(on_gpus(32), 30, slower=1.6)
    before = measured(config, steps, "")
    for step in steps[20:]:
        for key in ("rollout_idle_s", "weight_update_s", "weight_updates"):
            step[key] -= steps[19][key] - 0.01
    found = measured(config, steps, "")
    assert found.engine_s == pytest.approx(before.engine_s, rel=0.01) and found.pause_s == pytest.approx(before.pause_s)


def test_a_run_of_a_few_steps_says_nothing() -> None:
    with pytest.raises(ConfigError, match="--from runs/short: has 3 steps"):
        forecast.assume(on_gpus(), QWEN_7B, metrics(on_gpus(), 3, 1.0), "runs/short")


def test_metrics_without_what_is_needed_are_refused() -> None:
    steps = metrics(on_gpus(), 12, 1.0)
    del steps[-1]["running"]
    with pytest.raises(ConfigError, match="has steps without running: another version"):
        forecast.assume(on_gpus(), QWEN_7B, steps, "runs/old")
    steps[-1]["running"] = None
    with pytest.raises(ConfigError, match="has steps without running"):
        forecast.assume(on_gpus(), QWEN_7B, steps, "runs/old")


# -- the command -----------------------------------------------------------------------------------------------------------

def test_the_command_tells_all_that_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["experiment=tiny", "allocation.num_devices=8"]
    assert command.main([*settings, "--mean-tokens", "3.5", "--steps", "10"], CONF) == 0
    told = capsys.readouterr().out
    assert told.startswith("plan: 8 devices: 6 for inference") and "predicted: " in told and "\nlimited by " in told and "\n10 steps: " in told
    for name in UNITS:
        assert f"\n  {name} " in told
    assert "3.5 tokens of an answer (given)" in told


def test_the_command_speaks_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", "experiment=tiny"], CONF) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens_per_s"] > 0 and told["limit"] in words.LIMITS and told["assumed"]["mfu"] == {"value": 0.35, "from": "usual"}


@pytest.mark.parametrize(("arguments", "words"), [
    (["--mfu", "-1", "experiment=tiny"], "--mfu -1: must be greater than 0"), (["--steps", "0", "experiment=tiny"], "--steps 0: must be at least 1"),
    (["--mfu", "40", "experiment=tiny"], "--mfu 40: is a share, must be at most 1"),
    (["--prompt-tokens", "9000", "experiment=tiny"], "--prompt-tokens=9000.0: must be at most"),
    (["--mean-tokens", "900", "experiment=tiny"], "--mean-tokens=900.0: must be at most workflow.max_new_tokens="),
    (["model.path=/there/is/none", "data=arithmetic"], "/there/is/none: no readable config.json"),
    (["experiment=tiny", "staleness.eta=-1"], "staleness.eta=-1: must")])
def test_a_mistake_is_told(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments, CONF) == 2
    assert words in capsys.readouterr().err


def test_a_key_that_does_nothing_is_said_beside_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    without = ["evaluation.enabled=false", "evaluation.every_steps=0", "evaluation.temperature=0.5"]
    assert command.main(["--json", "experiment=tiny", *without], CONF) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) and "evaluation.temperature" in told.err


def test_where_everything_runs_on_gpus_the_speed_of_a_cpu_is_not_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-8B"]))
    settings = ["cluster=site_modules", "experiment=math_qwen3_8b", f"model.path={tmp_path}", "data=arithmetic", "reward.verifier=math"]
    assert command.main(settings, CONF) == 0
    assert "cpu_gflops" not in capsys.readouterr().out
    assert command.main(["--cpu-gflops", "20", *settings], CONF) == 2
    assert "--cpu-gflops=20.0: must be left out, as everything runs on GPUs. Their speed is that of cluster.*.gpu_type" in capsys.readouterr().err
    assert command.main(["experiment=tiny", "--cpu-gflops", "20", "run.seed=2"], CONF) == 0, "flags may stand anywhere"
    assert "20 GFLOP/s of a core of a CPU (given)" in capsys.readouterr().out


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit:
        command.main(["--from", str(tmp_path), "experiment=tiny"], CONF)
    assert exit.value.code == 2
