"""What pipeline stages send each other, without telling the shapes: all ranks of a copy pack the same micro-batches, so each knows them.

    lengths of the micro-batches --> the i-th that comes from the stage before (activations), the i-th from the one behind (gradients)

With interleaved stages the first one gets from the last what is not through the model yet, and the last from the first likewise.

Megatron-core sends the shape of each tensor before it, and the host waits for the device to read it: three times a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from workers.trainer.batch.pipeline_schedule import passes_in_order


class StageExchange(P2PCommunicator):
    """Megatron-core's exchange between the stages of its 1F1B schedules, for micro-batches of which this rank has `lengths` tokens, in order."""

    def __init__(self, config: Any, lengths: Sequence[int]) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        super().__init__(group, config)
        order = passes_in_order(len(lengths), group.size(), config.virtual_pipeline_model_parallel_size or 1)
        self._activations, self._gradients = ([
            (lengths[item], 1, config.hidden_size) for item, piece in reversed(order) if group.rank() != end or piece < order[-1][1]]
            for end in (0, group.size() - 1))

    def _communicate_shapes(self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        return self._activations.pop() if recv_prev else None, self._gradients.pop() if recv_next else None


def schedule_keywords(config: Any, lengths: Sequence[int]) -> dict[str, Any]:
    """Keywords of Megatron-core's schedule where there are stages: its groups, and a `StageExchange`."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    return {"p2p_communicator": StageExchange(config, lengths),
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"])}
