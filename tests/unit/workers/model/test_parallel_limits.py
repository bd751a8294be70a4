"""Which models can be split how: what is refused, with which words, and that Megatron's sizes then come out even."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.workers.model.test_architecture import MIXTURE, write_config
from workers.config import ConfigError, ParallelConfig
from workers.model.architecture import Architecture, read_architecture
from workers.model.experts import MixtureOfExperts
from workers.model.parallel_limits import check_parallel, expert_tensor_parallel

DENSE = {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 30, "num_hidden_layers": 9, "hidden_size": 24}


@pytest.mark.parametrize("parallel", [
    ParallelConfig(), ParallelConfig(tp=3), ParallelConfig(tp=6, pp=9, cp=5, dp=7), ParallelConfig(tp=2, sequence=False)])
def test_what_comes_out_even_is_accepted(tmp_path: Path, parallel: ParallelConfig) -> None:
    check_parallel(read_architecture(write_config(tmp_path, **DENSE)), parallel)


@pytest.mark.parametrize(("parallel", "text"), [
    (ParallelConfig(tp=5), r"trainer\.parallel\.tp=5: must divide the model's num_attention_heads=12\. Use one of \[1, 2, 3, 6\]"),
    (ParallelConfig(tp=4), r"tp=4: must divide the model's num_key_value_heads=6\. Use one of \[1, 2, 3, 6\]"),
    (ParallelConfig(tp=12), r"tp=12: must divide the model's num_key_value_heads=6\. Use one of \[1, 2, 3, 6\]"),
    (ParallelConfig(pp=2), r"trainer\.parallel\.pp=2: must divide the model's num_hidden_layers=9\. Use one of \[1, 3\]"),
    (ParallelConfig(pp=10), r"pp=10: must divide the model's num_hidden_layers=9\. Use one of \[1, 3, 9\]"),
    (ParallelConfig(pp=3, vpp=2), r"trainer\.parallel\.vpp=2: must divide the model's num_hidden_layers / 3=3\. Use one of \[1, 3\]"),
    (ParallelConfig(ep=2), r"trainer\.parallel\.ep=2: a llama model has no experts to share\. Use 1"),
])
def test_what_does_not_come_out_even_is_refused(tmp_path: Path, parallel: ParallelConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_parallel(read_architecture(write_config(tmp_path, **DENSE)), parallel)


def test_the_mlp_must_be_divided_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tp=6: must divide the model's intermediate_size=28\. Use one of \[1, 2\]"):
        check_parallel(read_architecture(write_config(tmp_path, **{**DENSE, "intermediate_size": 28})), ParallelConfig(tp=6))


@pytest.mark.parametrize(("parallel", "text"), [
    (ParallelConfig(ep=3), r"trainer\.parallel\.ep=3: must divide the model's num_experts=4\. Use one of \[1, 2, 4\]"),
    (ParallelConfig(tp=2, ep=4), r"tp=2: must divide the model's num_attention_heads=3"),
    (ParallelConfig(tp=3), r"tp=3: must divide the model's moe_intermediate_size=4\. Use one of \[1\]"),
    (ParallelConfig(tp=3, ep=2, sequence=False), r"parallel\.sequence=False: must be true for a mixture of experts with trainer\.parallel\.tp=3"),
])
def test_what_cannot_be_done_with_a_mixture(tmp_path: Path, parallel: ParallelConfig, text: str) -> None:
    sizes: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 3, "moe_intermediate_size": 4, "intermediate_size": 7, "head_dim": 4}
    architecture = read_architecture(write_config(tmp_path, **MIXTURE | sizes))
    with pytest.raises(ConfigError, match=text):
        check_parallel(architecture, parallel)
    check_parallel(architecture, ParallelConfig(tp=3, ep=2))  # whole experts are dealt out
    check_parallel(architecture, ParallelConfig(ep=4))


@given(tp=st.integers(1, 8), pp=st.integers(1, 4), ep=st.integers(1, 4), heads=st.integers(1, 8), group=st.integers(1, 3), inner=st.integers(1, 40),
       layers=st.integers(1, 8), experts=st.integers(0, 8))
def test_whatever_is_accepted_comes_out_even(tp: int, pp: int, ep: int, heads: int, group: int, inner: int, layers: int, experts: int) -> None:
    mixture = MixtureOfExperts(experts, 1, inner, False) if experts else None
    architecture = Architecture(
        family="qwen3_moe" if experts else "qwen3", vocab_size=7, hidden_size=4, intermediate_size=inner, num_layers=layers, num_heads=heads * group,
        num_kv_heads=heads, head_dim=2, max_positions=8, rms_norm_eps=1e-6, tied=False, rope_theta=1e4, rope_scaling=None, eos_token_ids=(),
        mixture=mixture)
    parallel = ParallelConfig(tp=tp, pp=pp, ep=ep)
    even = heads % tp == 0 and layers % pp == 0 and inner % (expert_tensor_parallel(parallel) if experts else tp) == 0 and (
        experts % ep == 0 if experts else ep == 1)
    try:
        check_parallel(architecture, parallel)
    except ConfigError:
        assert not even
    else:
        assert even


@given(vocabulary=st.integers(1, 300000), tp=st.integers(1, 64))
def test_a_padded_vocabulary_is_the_next_multiple(vocabulary: int, tp: int) -> None:
    architecture = Architecture(family="llama", vocab_size=vocabulary, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=1, num_kv_heads=1,
                                head_dim=2, max_positions=8, rms_norm_eps=1e-6, tied=False, rope_theta=1e4, rope_scaling=None, eos_token_ids=())
    padded = architecture.padded_vocab_size(tp)
    assert padded % tp == 0 and vocabulary <= padded < vocabulary + tp
