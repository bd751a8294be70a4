"""The requests that the engine's HTTP API takes, and their checks. Field names and defaults are SGLang's.

An unknown field, a wrong type or a value that cannot work raises `RequestError` naming value, rule and remedy. SGLang
fields that have no effect here are declared below as accepted and ignored; fields of sampling features that the engine
lacks are accepted at their neutral value only.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from workers.rollout.engines.servers.embedded.requests import Request, Sampling
from workers.rollout.engines.servers.embedded.text import Text

MAX_SHOWN, MAX_RID_CHARS = 200, 1000
MAX_STOPS, MAX_STOP_CHARS = 64, 1000


class RequestError(ValueError):
    """A request that cannot be served; HTTP 400."""


def require(ok: bool, field: str, value: object, rule: str, remedy: str) -> None:
    """Raise `RequestError` unless `ok`."""
    if not ok:
        raise RequestError(f"{field}={_shown(value)}: {rule}. {remedy}")


def _shown(value: object) -> str:
    return f"{value!r:.{MAX_SHOWN}}"


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """How to sample; see SGLang's sampling parameters."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False  # stop_token_ids are ignored as well
    skip_special_tokens: bool = True
    sampling_seed: int | None = None
    # Neutral values only.
    n: int = 1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_stop_trim: bool = False
    # Accepted and ignored.
    spaces_between_special_tokens: bool = True


class Generate(msgspec.Struct, forbid_unknown_fields=True):
    """POST /generate."""

    rid: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    return_logprob: bool = False
    return_routed_experts: bool = False
    # Neutral values only.
    stream: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    cache_salt: str | None = None
    # Accepted and ignored.
    return_text_in_logprobs: bool = False
    log_metrics: bool = True
    priority: int | None = None


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    """POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(msgspec.Struct, forbid_unknown_fields=True):
    """POST /continue_generation."""

    torch_empty_cache: bool = True  # accepted and ignored


class Abort(msgspec.Struct, forbid_unknown_fields=True):
    """POST /abort_request. `rid`, the id of a request, matches every other one whose id starts with it as well."""

    rid: str = ""
    abort_all: bool = False
    abort_message: str | None = None


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    """POST /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    load_format: Literal["auto", "safetensors"] | None = None
    # Accepted and ignored.
    is_async: bool = False
    torch_empty_cache: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0


class Begin(msgspec.Struct, forbid_unknown_fields=True):
    """POST /begin_weight_update."""

    selector: Literal["target", "draft", "all"] = "all"  # accepted and ignored: there is no draft model


class End(msgspec.Struct, forbid_unknown_fields=True):
    """POST /end_weight_update."""


class InitGroup(msgspec.Struct, forbid_unknown_fields=True):
    """POST /init_weights_update_group: become rank `rank_offset` of `world_size`; rank 0 is at master_address:master_port."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroup(msgspec.Struct, forbid_unknown_fields=True):
    """POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class FromDistributed(msgspec.Struct, forbid_unknown_fields=True):
    """POST /update_weights_from_distributed: rank 0 broadcasts the named tensors now, in this order; with `starts` (not SGLang's) slices of them."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None
    starts: list[list[int]] | None = None
    # Accepted and ignored.
    selector: Literal["target", "draft", "all"] = "all"
    torch_empty_cache: bool = False


Body = TypeVar("Body", bound=msgspec.Struct)
_NEUTRAL: tuple[tuple[str, object], ...] = (
    ("n", 1), ("min_p", 0.0), ("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("repetition_penalty", 1.0), ("no_stop_trim", False))


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Parse a JSON body (empty means {}). Raises `RequestError`."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fields = ", ".join(field.name for field in msgspec.structs.fields(kind))
        shown = body[:200].decode(errors="replace")
        raise RequestError(f"request body {shown!r}: {str(error)[:500]}. Send a JSON object with fields of: {fields}") from error


@dataclass(frozen=True)
class Limits:
    """What this engine's model and tokenizer allow. `seeds` gives the seed of a request that brings none."""

    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    text: Text | None
    seeds: random.Random

    def request(self, body: Generate, prompt: list[int]) -> Request:
        """The scheduler's request for `body`, whose prompt is `prompt`. Raises `RequestError`."""
        params = body.sampling_params
        self._check_neutral(body)
        self._check_lengths(params, len(prompt))
        require(body.rid is None or 1 <= len(body.rid) <= MAX_RID_CHARS, "rid", body.rid, f"must have 1 to {MAX_RID_CHARS} characters", "Shorten it")
        require(params.temperature == 0 or 1e-5 <= params.temperature <= 1e5, "temperature", params.temperature, "must be 0, or from 1e-5 to 1e5",
                "0 is greedy")
        require(0 < params.top_p <= 1, "top_p", params.top_p, "must be in (0, 1]", "1 is no nucleus cut")
        require(params.top_k == -1 or 1 <= params.top_k < 2**31, "top_k", params.top_k, "must be -1, or at least 1 and below 2^31", "-1 is no cut")
        require(params.sampling_seed is None or 0 <= params.sampling_seed < 2**63, "sampling_seed", params.sampling_seed,
                "must be at least 0 and below 2^63", "Leave it out for one by chance")
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        require(len(stops) <= MAX_STOPS and all(len(stop) <= MAX_STOP_CHARS for stop in stops), "stop", params.stop,
                f"must be at most {MAX_STOPS} texts of {MAX_STOP_CHARS} characters", "Shorten it")
        require(not stops or self.text is not None, "stop", params.stop, "needs a tokenizer.json in the model folder", "Use stop_token_ids")
        require(all(stops), "stop", params.stop, "must not hold an empty string", "Leave it out")
        stop_ids = frozenset(params.stop_token_ids or ())
        self._check_ids("stop_token_ids", sorted(stop_ids))
        seed = self.seeds.getrandbits(63) if params.sampling_seed is None else params.sampling_seed
        return Request(
            rid=uuid.uuid4().hex if body.rid is None else body.rid,
            prompt=prompt,
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            stop_ids=frozenset() if params.ignore_eos else stop_ids | self.eos_ids,
            stop_texts=tuple(stops),
            sampling=Sampling(params.temperature, params.top_p, params.top_k, seed),
        )

    def _check_neutral(self, body: Generate) -> None:
        require(not body.stream, "stream", body.stream, "is not supported", "Send false: the reply comes when the request has ended")
        require(body.top_logprobs_num == 0, "top_logprobs_num", body.top_logprobs_num, "is not supported", "Send 0")
        require(body.logprob_start_len == -1, "logprob_start_len", body.logprob_start_len, "prompt log-probs are not supported", "Send -1")
        require(body.cache_salt is None, "cache_salt", body.cache_salt, "is not supported", "Leave it out: prefixes are shared")
        for field, neutral in _NEUTRAL:
            value = getattr(body.sampling_params, field)
            require(value == neutral, field, value, f"only {neutral!r} is supported", "Leave it out, or send several requests instead of n")

    def prompt(self, body: Generate) -> list[int]:
        """The token ids of its prompt: of a text that is far over the context, enough of them to say so. Raises `RequestError`."""
        require((body.text is None) != (body.input_ids is None), "text, input_ids", (body.text, body.input_ids),
                "exactly one of the two must be given", "Send input_ids, or text")
        if body.input_ids is not None:
            prompt = body.input_ids
            self._check_ids("input_ids", prompt)
        else:
            require(self.text is not None, "text", body.text, "needs a tokenizer.json in the model folder", "Send input_ids")
            assert self.text is not None and body.text is not None
            prompt = self.text.encode(body.text, self.context_length)
        require(len(prompt) > 0, "input_ids", prompt, "must hold at least one token", "Send a prompt")
        return prompt

    def _check_ids(self, field: str, ids: list[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise RequestError(f"{field} holds {wrong}: must be in [0, {self.vocab_size}), the model's vocabulary. Use the model's own tokenizer")

    def _check_lengths(self, params: SamplingParams, prompt_length: int) -> None:
        require(params.max_new_tokens >= 1, "max_new_tokens", params.max_new_tokens, "must be at least 1", "Give the longest answer")
        require(0 <= params.min_new_tokens <= params.max_new_tokens, "min_new_tokens", params.min_new_tokens,
                f"must be from 0 to max_new_tokens={params.max_new_tokens}", "Give the shortest answer")
        total = prompt_length + params.max_new_tokens
        require(total <= self.context_length, "prompt tokens + max_new_tokens", f"{prompt_length} + {params.max_new_tokens}",
                f"must be at most the context length {self.context_length}",
                "Shorten the prompt, lower max_new_tokens or raise --context-length")
