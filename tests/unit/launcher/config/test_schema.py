"""Every bad value fails at compose time, before anything starts, with key, value, rule and remedy."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from hypothesis import given
from hypothesis import strategies as st

from launcher import __main__ as command
from launcher.__main__ import CONF
from launcher.config.cluster import seconds
from launcher.config.schema import FullConfig, as_yaml, read_full, register, to_object
from workers.config import Config, ConfigError, load
from workers.run.folder import RunFolder

register()

SLURM = ["cluster=slurm", "cluster.inference.partition=a", "cluster.train.partition=b"]


def composed(*overrides: str) -> FullConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return to_object(compose("config", overrides=["model.path=/model", *overrides]))


def test_variables_of_a_role_are_its_own_besides_those_of_all() -> None:
    full = composed("cluster=slurm", "+cluster.env.FOR=all", "+cluster.env.ALL=1", "+cluster.train.env.FOR=train", "+cluster.inference.env.OWN=2",
                    "cluster.train.python='~/venv/bin/python'")
    for _ in range(2):  # also of a run that is resumed
        full.settle()
        assert full.cluster.train.env == {"FOR": "train", "ALL": "1"} and full.cluster.inference.env == {"FOR": "all", "ALL": "1", "OWN": "2"}
    assert full.cluster.train.python == f"{Path.home()}/venv/bin/python"


@pytest.mark.parametrize("experiment", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_every_experiment_composes(experiment: str) -> None:
    config = composed(f"experiment={experiment}")
    assert config.plan().num_replicas >= (0 if config.supervised else 1)


@pytest.mark.parametrize("override", [f"{group.name}={path.stem}" for group in sorted(CONF.iterdir()) if group.is_dir() and group.name != "experiment"
                                      for path in sorted(group.glob("*.yaml"))])
def test_every_group_file_composes(override: str) -> None:
    extra = {"data=jsonl": ["data.path=a", "data.heldout_path=b"], "engine=sglang": ["trainer.microbatch_tokens=4096"],
             "workflow=agent": ["workflow.agent=a:b"], "workflow=verifiers": ["workflow.env=a"]}.get(override, [])
    composed(override, *extra, "model.path=/model")


@pytest.mark.parametrize("override", [
    "trainer.learning_rate=1", "nonsense=1", "trainer.lr=fast", "staleness.bound=loose", "engine.num_slots=1.5", "engine.server=vllm",
    "workflow.stop=text", "trainer=missing",
])
def test_unknown_keys_and_wrong_types_fail(override: str) -> None:
    with pytest.raises((ConfigCompositionException, ConfigError)):
        composed(override)


@pytest.mark.parametrize(("override", "words"), [
    ("allocation.inference_fraction=0", "greater than 0"), ("allocation.inference_fraction=1", "less than 1"),
    ("allocation.inference_fraction=1.5", "less than 1"), ("staleness.eta=-1", "0 or more"),
    ("staleness.max_divergence=0", "must be positive"), ("staleness.max_divergence_p99=-1", "must be positive"), ("staleness.min_ess=1", "min_ess"),
    ("staleness.warmup_steps=-1", "must not be negative"), ("trainer.num_minibatches=3", r"\[1, 2, 4, 8\]"),
    ("trainer.batch_groups=0", "at least 1"), ("workflow.temperature=0", "greater than 0"), ("workflow.group_size=1", "batch_norm"),
    ("workflow.top_p=0", "top_p"), ("workflow.max_new_tokens=256", "context_length"), ("run.num_steps=0", "at least 1"),
    ("run.name='a b'", "letters"), ("transport.port_range=99", "FIRST-LAST"), ("transport.port_range=9000-8000", "FIRST <= LAST"),
    ("transport.heartbeat_timeout_s=1", "twice"), ("reward.correct=-6", "reward.wrong"), ("algorithm.clip_epsilon=1", "0.2"),
    ("algorithm.behavior_cap=0.5", "1 or more"), ("trainer.min_lr=1", "trainer.lr"), ("data.digits=9", "1 to 6"), ("data=jsonl", "data.path"),
    ("model.path=''", "model.path"), ("run.target_accuracy=2", "target_accuracy"), ("run.max_hours=0", "max_hours"),
    ("rollout.concurrency=0", "concurrency"), ("engine.num_slots=0", "num_slots"), ("evaluation.every_steps=-1", "every_steps"),
])
def test_impossible_values_fail_with_rule_and_remedy(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        composed(override)
    assert override.split("=")[0].split(".")[0] in str(caught.value)


@pytest.mark.parametrize(("overrides", "words"), [
    (["staleness.eta=0"], "staleness.control='divergence': must be eta with staleness.eta=0"), (["staleness.max_divergence=null"], "needs a budget"),
    (["algorithm=ppo", "staleness.min_ess=0.5"], "must be null with algorithm.decoupled=false")])
def test_a_controlled_lead_needs_something_to_go_by(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        composed("staleness.control=divergence", *overrides)
    composed("staleness.control=divergence", "staleness.max_divergence=null", "staleness.min_ess=0.5")


@pytest.mark.parametrize(("overrides", "words"), [
    (["cluster.time=''"], "cluster.inference.time=''.*HH:MM:SS"), (["cluster.train.time=UNLIMITED"], "cluster.train.time"),
    (["cluster.time=0"], "not without limit"), (["cluster.train.time=3"], "twice cluster.signal_delay_s=120"),
    (["cluster.train.mem=lots"], "64G"), (["cluster.train.mem=1G", "cluster.train.mem_per_gpu=1G"], "one of the two"),
    (["cluster.train.cpus_per_gpu=1", "cluster.train.cpus_per_task=1"], "one of the two"), (["cluster.train.cpus_per_gpu=-1"], "negative"),
    (["cluster.train.gpus=none", "cluster.train.gpu_type=a100"], "gpus=gres"), (["cluster.container.image=a.sif"], "kind=apptainer"),
    (["cluster.container.kind=pyxis"], "container.image=''.*must be given"), (["cluster.spare_chunks=-1"], "spare_chunks"),
    (["cluster.container.kind=apptainer", "cluster.container.image=a", "cluster.container.args=[--cleanenv]"], "SLURM's variables"),
    (["cluster.probe_s=-1"], "leaves the probe out"), (["cluster.max_submit=-1"], "SLURM's own limits"), (["cluster.signal_delay_s=1"], "10 to 3600"),
    (["+cluster.train.sbatch.array=0-1"], "Headway sets --array itself"), (["launch.max_concurrent_runs=-1"], "as many as fit"),
    (['cluster.train.account="a\nb"'], "one line"),
])
def test_impossible_values_for_slurm_fail_with_rule_and_remedy(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        composed(*SLURM, *overrides)


def test_both_roles_take_what_the_cluster_says_unless_they_have_their_own() -> None:
    config = composed(*SLURM, "cluster.account=a", "cluster.setup=[module load x]", "cluster.time=60", "cluster.train.time=120",
                      "cluster.container.kind=pyxis", "cluster.container.image=i", "+cluster.train.sbatch.nice=5").cluster
    assert config.inference.account == config.train.account == "a" and config.train.setup == ["module load x"]
    assert (config.inference.time_limit_s, config.train.time_limit_s) == (3600, 7200)
    assert config.inference.container.image == "i" and config.train.sbatch == {"nice": "5"} and config.inference.sbatch == {}


def test_defaults_that_mean_this_machine_are_replaced_on_slurm() -> None:
    assert (composed().weights.dir, composed().transport.interface) == ("auto", "127.0.0.1")
    config = composed(*SLURM)
    assert (config.weights.dir, config.transport.interface) == ("auto", "auto"), "each node's own memory"
    config = composed(*SLURM, "weights=disk")
    assert (config.weights.dir, config.transport.interface) == ("run", "auto"), "which all nodes read"
    config = composed(*SLURM, "weights.dir=/fast", "transport.interface=ib0")
    assert (config.weights.dir, config.transport.interface) == ("/fast", "ib0")


@given(st.integers(0, 9), st.integers(0, 30), st.integers(0, 70), st.integers(0, 70))
def test_time_limits_are_read_as_sbatch_reads_them(days: int, hours: int, minutes: int, rest: int) -> None:
    def rounded(value: int) -> int:
        return -(-value // 60) * 60

    total = ((days * 24 + hours) * 60 + minutes) * 60
    assert seconds(f"{days}-{hours}:{minutes:02d}:{rest:02d}") == rounded(total + rest)
    assert seconds(f"{days}-{hours}:{minutes}") == total and seconds(f"{days}-{hours}") == total - minutes * 60
    assert seconds(f"{hours}:{minutes}:{rest}") == rounded(total - days * 86400 + rest)
    assert seconds(f"{minutes}:{rest}") == rounded(minutes * 60 + rest) and seconds(str(minutes)) == minutes * 60


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1:2:3:4", "UNLIMITED", "1.5"])
def test_what_is_no_time_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        seconds(text)


def test_without_conf_the_command_says_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "CONF", tmp_path / "conf")
    monkeypatch.setattr("sys.argv", ["headway", "--dry-run"])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 2
    assert f"{tmp_path}/conf: not found" in (said := capsys.readouterr().err) and "Install it again, from a wheel or from a checkout" in said


def test_a_missing_model_path_is_named() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(ConfigError, match="model.path"):
        to_object(compose("config"))


@pytest.mark.parametrize("overrides", [
    ["experiment=tiny"], [*SLURM, "cluster.setup=[a,b]", "+cluster.train.sbatch.nice=5", "staleness.eta=7", "cluster.train.pythonpath=/a:/b"]])
def test_the_full_config_of_a_run_is_read_back(tmp_path: Path, overrides: list[str]) -> None:
    config = composed(*overrides)
    run = RunFolder.create(tmp_path / "run")
    run.config_yaml.write_bytes(as_yaml(config))
    run.config.write_bytes(msgspec.json.encode(config.for_workers()))
    assert read_full(run) == config
    config.model.path = "/resolved"  # by workers/prepare.py, in the workers' part only
    run.config.write_bytes(msgspec.json.encode(config.for_workers()))
    assert read_full(run) == config
    run.config_yaml.write_text("cluster: [")
    with pytest.raises(ConfigError, match="Start the run again"):
        read_full(run)


def test_the_workers_read_back_what_was_composed(tmp_path: Path) -> None:
    config = composed("experiment=tiny", "staleness.bound=hard", "workflow.stop=['a','b']").for_workers()
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(config))
    assert load(path) == config and isinstance(load(path), Config)


def test_what_an_earlier_version_stored_means_what_it_meant(tmp_path: Path) -> None:
    """Parts of a mixture had all keys then, which counted where they were not the defaults; nothing stood before prompts."""
    config = composed("experiment=tiny", "data=mixture", "data.chat_template=true", "data.max_prompt_tokens=50", "data.filter=drop").for_workers()
    stored = msgspec.json.decode(msgspec.json.encode(config))
    del stored["data"]["bos"]
    unsaid = {"chat_template": False, "chat_template_kwargs": {}, "chat_template_date": "", "max_prompt_tokens": 0, "max_reference_kb": 1024,
              "filter": "refuse", "parts": {}}
    for part in stored["data"]["parts"].values():
        part.update(unsaid)
        del part["bos"]
    stored["data"]["parts"]["sums"]["max_prompt_tokens"] = 9
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(stored))
    data = load(path).data
    assert [(part.chat_template, part.max_prompt_tokens, part.filter.value, part.bos) for part in data.sources()] == [
        (True, 9, "drop", ""), (True, 50, "drop", "")]
    path.write_bytes(msgspec.json.encode(config))
    assert load(path) == config and load(path).data.bos == "auto"


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b'{"run": {"seed": "one"}}', b'{"data": {"parts": 1}}', b'{"data": {"parts": {"a": 1}}}', b'{"data": 1}'])
def test_a_broken_run_config_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="Start the run again"):
        load(path)


@pytest.mark.parametrize(("overrides", "key"), [
    (["engine.server=synthetic"], "engine.server"),
    (["engine=sglang", "trainer.microbatch_tokens=4096", "engine.parallel.pp=2", "allocation.replica_size=2"], "engine.parallel.pp"),
    (["engine=sglang", "trainer.microbatch_tokens=4096", "engine.parallel.tp=2", "engine.parallel.dp_attention=2", "allocation.replica_size=2"],
     "engine.parallel.dp_attention"),
])
def test_what_cannot_take_broadcasts_is_refused(overrides: list[str], key: str) -> None:
    more = ["allocation.num_devices=8", *overrides]
    composed(*more, "weights=zmq")
    with pytest.raises(ConfigError, match=f"{key}=.*weights.transport=nccl"):
        composed(*more, "weights=nccl")


@pytest.mark.parametrize(("overrides", "key"), [
    (["engine=sglang", "trainer.microbatch_tokens=4096"], "engine.server"), (["engine.interrupt=abort"], "engine.interrupt"),
    (["weights=nccl"], "weights.swap")])
def test_what_cannot_load_weights_beside_those_that_serve_is_refused(overrides: list[str], key: str) -> None:
    composed(*overrides)
    assert composed("weights.swap=overlap", "weights=auto").weights.transport.value == "zmq"
    with pytest.raises(ConfigError, match=f"{key}="):
        composed(*overrides, "weights.swap=overlap")


@pytest.mark.parametrize(("overrides", "key"), [
    (["engine.server=synthetic"], "engine.server"), (["engine=sglang", "engine.device=cpu"], "engine.device"),
    (["engine=sglang", "engine.parallel.pp=2", "allocation.replica_size=2", "allocation.num_devices=8"], "engine.parallel.pp")])
def test_routing_is_asked_only_of_servers_that_tell_it(overrides: list[str], key: str) -> None:
    more = ["trainer.microbatch_tokens=4096", *overrides]
    assert composed(*more).replayed is None
    with pytest.raises(ConfigError, match=f"{key}=.*algorithm.router_replay=rollout"):
        composed(*more, "algorithm.router_replay=rollout")
    assert composed("algorithm.router_replay=rollout").replayed is not None


def test_routing_is_replayed_only_where_something_is_generated_and_trained() -> None:
    with pytest.raises(ConfigError, match="algorithm.router_replay='rollout': must be off with run.kind=supervised"):
        composed("experiment=sft_tiny", "algorithm.router_replay=rollout")


ON_GPUS = ("cluster=slurm", "model.path=/m", "engine=sglang")


@pytest.mark.parametrize(("more", "tokens"), [
    ((), 8192), (("cluster.train.gpu_type=h100",), 16384), (("cluster.train.gpu_memory_gb=48",), 8192), (("cluster.train.gpu_memory_gb=24",), 4096),
    (("cluster.train.gpu_memory_gb=24", "engine.context_length=30000"), 30000), (("cluster.train.gpus=none",), 4096),
    (("cluster.fake_gpus=true",), 4096),
    (("trainer.microbatch_tokens=5000",), 5000)])
def test_micro_batches_go_by_the_memory_of_a_gpu(more: tuple[str, ...], tokens: int) -> None:
    assert composed(*ON_GPUS, *more).trainer.microbatch_tokens == tokens, "on CPUs as many as the context has, which is 4096"


@pytest.mark.parametrize(("more", "size"), [
    ((), 1), (("allocation.num_devices=32", "allocation.devices_per_node=8"), 8), (("allocation.num_devices=16", "allocation.devices_per_node=8"), 1),
    (("allocation.num_devices=8", "allocation.devices_per_node=8", "engine.parallel.tp=2"), 2),
    (("allocation.num_devices=32", "cluster.inference.devices_per_node=4"), 4),
    (("allocation.num_devices=32", "allocation.devices_per_node=8", "cluster.inference.devices_per_node=6"), 6),
    (("allocation.num_devices=16", "cluster.inference.devices_per_node=6", "allocation.replica_size=4"), 4),
    (("engine.parallel.tp=4", "allocation.num_devices=16"), 4),
    (("allocation.num_devices=32", "allocation.devices_per_node=8", "allocation.replica_size=2"), 2),
    (("allocation.num_devices=32", "allocation.devices_per_node=8", "cluster.fake_gpus=true"), 1)])
def test_a_rollout_worker_has_a_node_where_that_is_known_and_comes_out_even(more: tuple[str, ...], size: int) -> None:
    config = composed(*ON_GPUS, *more)
    assert config.allocation.replica_size == size and config.plan().num_unused == 0


@pytest.mark.parametrize(("more", "way"), [
    ((), "nccl"), (("engine=embedded",), "zmq"), (("engine.parallel.pp=2",), "zmq"), (("engine.device=cpu",), "zmq"),
    (("cluster.fake_gpus=true",), "zmq"),
    (("cluster.inference.gpus=none",), "zmq"), (("trainer.device=cpu",), "zmq"), (("weights=zmq",), "zmq"), (("weights=disk",), "disk")])
def test_weights_go_from_gpu_to_gpu_where_they_can(more: tuple[str, ...], way: str) -> None:
    assert composed(*ON_GPUS, "allocation.num_devices=8", *more).weights.transport.value == way


def test_gpus_that_are_asked_for_by_hand_are_gpus() -> None:
    by_hand = composed("cluster=slurm", "engine=sglang", "cluster.train.gpus=none", "+cluster.train.sbatch.gres=gpu:h100:8")
    assert by_hand.gives_gpus("train") and not composed("cluster=slurm", "cluster.train.gpus=none").gives_gpus("train")
    assert not composed("cluster=slurm", "cluster.train.gpus=none", "+cluster.train.sbatch.gres=nvme:1").gives_gpus("train")
    more = ("cluster.train.cpus_per_gpu=8", "cluster.train.mem_per_gpu=64G", "cluster.train.gpu_memory_gb=80")
    assert composed("cluster=slurm", "cluster.train.gpus=none", "+cluster.train.sbatch.gres=gpu:h100:8", *more).cluster.train.gpu_memory_gb == 80


@pytest.mark.parametrize("more", ["weights.security=curve", "weights.delta=true", "trainer.lora.rank=8 weights.adapter_only=true"])
def test_what_broadcasts_do_not_do_is_not_lost_by_auto(more: str) -> None:
    assert composed(*ON_GPUS, "allocation.num_devices=8", *more.split()).weights.transport.value == "zmq"
