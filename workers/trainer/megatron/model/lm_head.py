"""Log-probs of response tokens from hidden states, without ever holding [all tokens, vocabulary] logits.

Only positions that predict a response token come here, each once, however many samples share it. They are worked on in
chunks whose float32 logits take at most `max_logits_bytes`; backward makes a chunk's logits again, except where one chunk
was all there was, whose softmax is kept. The gradient of the weight, the largest of the model, goes straight into the
float32 gradient buffer where Megatron's data-parallel wrapper has one (as with its gradient_accumulation_fusion). A frozen weight gets none.

    hidden [U, H] --chunk--> logits [C, V] --> maximum m, sum of exponentials s, sum of exponentials times exponents t [C]
                                               targets' logits less m [N]
    m --all-reduce--> maximum over the vocabulary;    s, t, targets' at that maximum --all-reduce--> log-probs, entropy [N]

A vocabulary split over tensor-parallel ranks costs these two all-reduces, of U and 2 U + N numbers, however many chunks
there are: sums of exponentials of parts at different maxima are brought to the common one. Backward needs none: what it
returns for `hidden` is this rank's part of the gradient. Who gathered or copied `hidden` to the ranks adds the parts up. The entropy's
gradient needs nothing else either: the entropy itself, and the log-probs of this rank's part of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.trainer.megatron.model.compiled import compiled
from workers.trainer.megatron.model.weight_gradient import add_product
from workers.trainer.megatron.parallel import cpu_backend

# Every chunk reads and writes the whole gradient of the weight; an accelerator needs more rows to make up for that.
MAX_LOGITS_BYTES = 128 * 2**20
MAX_LOGITS_BYTES_ACCELERATOR = 2**29
NUM_SLICES = 8
"""Exponentials are made slice by slice on CPUs, and in a kernel's registers on GPUs: a chunk's are never there together with its logits."""


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of the output weight that this rank of `group` holds: ids from `first` on. Ids from `num_real` on are padding.

    Ranks of `group` hold equal numbers of rows, in the order of their ids; together they hold at least `num_real`.
    """

    group: dist.ProcessGroup
    first: int
    num_real: int

    def num_real_rows(self, num_rows: int) -> int:
        """How many of this rank's `num_rows` rows, the first ones, belong to real ids; may be 0."""
        return min(num_rows, max(0, self.num_real - self.first))


def token_logprobs(hidden: Tensor, weight: Tensor, index: Tensor, targets: Tensor, temperature: float,
                   vocab: VocabularyShard | None = None, max_logits_bytes: int | None = None,
                   entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` under softmax(hidden @ weight.T / temperature), and the entropy where each is predicted.

    `hidden` [U, H] and `weight` [V, H] in one floating dtype, `index` int64 [N] into the U positions, `targets` int64 [N]
    token ids. U and N may be 0. Returns two float32 [N]; the entropy (nats) carries a gradient with `entropy_gradient` only, which has
    backward make all logits again. Logits become float32 before the softmax. `index` in the host's memory saves an accelerator a wait.

    With `vocab`, `weight` holds this rank's rows of a padded vocabulary. All ranks of the group then call together, with
    the same `hidden`, `index` and `targets`, and get the same results; the gradient of `hidden` is this rank's part of it.
    """
    if max_logits_bytes is None:
        max_logits_bytes = MAX_LOGITS_BYTES if hidden.device.type == "cpu" else MAX_LOGITS_BYTES_ACCELERATOR
    chunk = max(1, max_logits_bytes // (4 * weight.shape[0]))
    order = torch.argsort(index, stable=True)
    bounds = [0, len(index)]
    if hidden.shape[0] > chunk:
        bounds = torch.searchsorted(index[order], torch.arange(0, hidden.shape[0] + chunk, chunk, device=index.device)).tolist()
    index, targets, order = (cpu_backend.upload(tensor, hidden.device) for tensor in (index, targets, order))
    return _TokenLogprobs.apply(hidden, weight, index, targets, _Setup(1.0 / temperature, chunk, order, bounds, vocab, entropy_gradient))


@dataclass(frozen=True)
class _Setup:
    """Positions in chunks of `chunk`; sorted by position (`order`), the tokens that those of number i predict are bounds[i] to bounds[i + 1]."""

    scale: float
    chunk: int
    order: Tensor
    bounds: list[int]
    vocab: VocabularyShard | None
    entropy_gradient: bool

    def chunks(self, num_positions: int) -> list[tuple[slice, slice]]:
        """Positions, and which of the sorted tokens they predict."""
        return [(slice(start, start + self.chunk), slice(self.bounds[number], self.bounds[number + 1]))
                for number, start in enumerate(range(0, num_positions, self.chunk))]

    def real_rows(self, weight: Tensor) -> Tensor:
        """`weight` [V, H] without the rows of padding."""
        return weight if self.vocab is None else weight[:self.vocab.num_real_rows(weight.shape[0])]

    def columns(self, targets: Tensor, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """Columns of the logits that belong to `targets`, and which of them this rank has (None: all); the others are 0."""
        if self.vocab is None:
            return targets, None
        columns = targets - self.vocab.first
        own = (columns >= 0) & (columns < num_rows)
        return torch.where(own, columns, 0), own


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, index: Tensor, targets: Tensor, setup: _Setup) -> tuple[Tensor, Tensor]:
        rows, order = setup.real_rows(weight), setup.order
        columns, own = setup.columns(targets, len(rows))
        sorted_index, sorted_columns, ctx.kept = index[order], columns[order], None
        sums, exponents = list[tuple[Tensor, Tensor, Tensor]](), list[Tensor]()
        for part, tokens in setup.chunks(len(hidden)) if len(rows) else []:
            logits, at = torch.matmul(hidden[part], rows.t()), sorted_index[tokens] - part.start
            sums.append(_sums(logits, setup.scale))
            exponents.append(_scaled(logits[at, sorted_columns[tokens]], setup.scale) - sums[-1][0][at])
            if len(hidden) <= setup.chunk and ctx.needs_input_grad[0] and not setup.entropy_gradient:
                ctx.kept = _scaled(logits, setup.scale).sub_(sums[-1][0][:, None]).exp_()
            del logits
        none = hidden.new_zeros(len(hidden), dtype=torch.float32)
        highest, total, weighted = map(torch.cat, zip(*sums, strict=True)) if sums else (none + torch.finfo(torch.float32).min, none, none)
        chosen = hidden.new_zeros(len(index), dtype=torch.float32)
        if sums:
            chosen[order] = torch.cat(exponents)
        common = highest
        if own is not None:
            assert setup.vocab is not None
            common, total, weighted, chosen = _over_ranks(setup.vocab.group, highest, total, weighted, chosen, index, own)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, index, columns, own, common + log_total, torch.exp(highest - common) / total, entropy)
        ctx.setup, ctx.main_grad = setup, getattr(weight, "main_grad", None)
        entropies = entropy[index]
        if not setup.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return chosen - log_total[index], entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, index, columns, own, lse, factor, entropy = ctx.saved_tensors
        setup, rows = ctx.setup, ctx.setup.real_rows(weight)
        summed = torch.zeros_like(lse).index_add_(0, index, grad).mul_(-setup.scale)
        summed_entropy = torch.zeros_like(lse).index_add_(0, index, entropy_grad).mul_(-setup.scale) if setup.entropy_gradient else None
        at_target = ((grad if own is None else grad * own) * setup.scale)[setup.order]
        index, columns = index[setup.order], columns[setup.order]
        grad_hidden = torch.empty_like(hidden) if len(rows) else torch.zeros_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.main_grad is None else ctx.main_grad
        for part, tokens in setup.chunks(len(hidden)) if len(rows) else []:
            # d logprob / d logit = onehot - softmax, summed over the tokens that the position predicts
            if summed_entropy is not None:
                logprobs = _scaled(torch.matmul(hidden[part], rows.t()), setup.scale).sub_(lse[part, None])
                slope = _slope_with_entropy(logprobs, summed[part], summed_entropy[part], entropy[part])
                del logprobs
            elif ctx.kept is None:
                slope = _softmax(torch.matmul(hidden[part], rows.t()), setup.scale, lse[part], summed[part])
            else:
                slope = ctx.kept.mul_((summed * factor)[:, None])
                ctx.kept = None  # overwritten; a second backward makes the logits again
            slope.index_put_((index[tokens] - part.start, columns[tokens]), at_target[tokens], accumulate=True)
            slope = slope.to(hidden.dtype)
            torch.matmul(slope, rows, out=grad_hidden[part])
            if grad_weight is not None:
                add_product(grad_weight[:len(rows)], slope.t(), hidden[part])
            del slope
        own_grad = None
        if grad_weight is not None:  # where it is added up already, one without entries tells that it is ready to be added up over copies
            own_grad = grad_weight.to(weight.dtype) if ctx.main_grad is None else _without_entries(weight)
        return grad_hidden, own_grad, None, None, None


def _without_entries(weight: Tensor) -> Tensor:
    rows = torch.zeros((1, 0), dtype=torch.int64, device=weight.device)
    return torch.sparse_coo_tensor(rows, weight.new_empty((0, weight.shape[1])), weight.shape, check_invariants=False)


def _slope_with_entropy(logprobs: Tensor, summed: Tensor, summed_entropy: Tensor, entropy: Tensor) -> Tensor:
    """softmax times `summed` [C], plus that of the entropy H [C]: d H / d logit = -softmax (log softmax + H). `logprobs` [C, V] are overwritten."""
    probabilities = logprobs.exp()
    return probabilities.mul_(logprobs.add_(entropy[:, None]).mul_(summed_entropy[:, None]).add_(summed[:, None]))


def _scaled(logits: Tensor, scale: float) -> Tensor:
    """`logits` as float32, which overwrites them where they are that, times `scale`."""
    return logits.float() if scale == 1.0 else logits.float().mul_(scale)


def _fused(logits: Tensor, scale: float) -> bool:
    """Whether torch compiles what is done with them: where it was seen to on a GPU (docs/gpu.md)."""
    return logits.device.type != "cpu" and logits.dtype is torch.bfloat16 and scale == 1.0


def _sums(logits: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The maxima of `scale` times `logits` [C, V]; less these: sums of exponentials, and of exponentials times exponents; float32 [C]."""
    if _fused(logits, scale):
        return compiled(_sums_of_rows)(logits)
    slices = logits.split(max(1, -(-len(logits) // NUM_SLICES)))
    found = [_sums_of_rows(rows if scale == 1.0 else rows.float() * scale) for rows in slices]
    highest, total, weighted = map(torch.cat, zip(*found, strict=True))
    return highest, total, weighted


def _sums_of_rows(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    highest = logits.amax(dim=-1)
    exponents = logits - highest[:, None]
    exponentials = exponents.exp()
    return highest, exponentials.sum(-1), exponents.mul_(exponentials).sum(-1)


def _softmax(logits: Tensor, scale: float, lse: Tensor, factors: Tensor) -> Tensor:
    """The softmax of `scale` times `logits` [C, V], which may be overwritten, whose log-sums of exponentials are `lse` [C], times `factors` [C];
    float32."""
    if _fused(logits, scale):
        return compiled(_softmax_of_rows)(logits, lse, factors)
    return _softmax_of_rows(_scaled(logits, scale), lse, factors)


def _softmax_of_rows(logits: Tensor, lse: Tensor, factors: Tensor) -> Tensor:
    return logits.float().sub_(lse[:, None]).exp_().mul_(factors[:, None])


def _over_ranks(group: dist.ProcessGroup, highest: Tensor, total: Tensor, weighted: Tensor, chosen: Tensor, index: Tensor,
                own: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The maxima over all ranks [U], and at these: sums of exponentials, of exponentials times exponents [U], targets' exponents [N].

    exp(x - m) = exp(x - m_rank) exp(m_rank - m), and each exponent changes by m_rank - m.
    """
    if dist.get_world_size(group) == 1 or highest.numel() == 0:
        return highest, total, weighted, chosen
    common = highest.clone()
    dist.all_reduce(common, dist.ReduceOp.MAX, group=group)
    down = highest - common
    shrink = down.exp()
    sums = torch.cat([total * shrink, (weighted + total * down) * shrink, torch.where(own, chosen + down[index], 0.0)])
    dist.all_reduce(sums, group=group)
    return common, *sums.split([len(common), len(common), len(index)])
