"""What a client asks of a sampler, checked.

Log-probabilities of sampled tokens are the model's own (temperature 1, nothing cut off), whatever the
temperature they were drawn at.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from kt_ray.generate.requests import Request, Sampling
from kt_ray.train_server.backend import Backend
from kt_ray.train_server.wire import bad, check_tokens, types

TOP = 20  # most probable tokens that can be asked for
MOST_SAMPLES = 128  # of one request
_UNSUPPORTED = {  # what to do
    "target_prompt_logprobs": "leave it out",
    "prompt_alt_tokens_k": "leave it out",
    "record_stability_info": "it is of the loss stable_reinforce. To fix: leave it out, and train with "
    "another loss (loss_fn=importance_sampling for recipes of the cookbook)",
}


@dataclass(frozen=True)
class SampleRequest:
    """One asample request."""

    samples: tuple[Request, ...]
    top: int  # most probable tokens of each sampled one
    prompt_logprobs: bool
    prompt_top: int  # most probable tokens at each place of the prompt
    last: int | None  # only so many tokens of the prompt get log-probabilities; None = all but the first
    draws: bool  # False = the prompt leaves no room, and is scored only

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.samples[0].prompt

    @property
    def wants_scores(self) -> bool:
        return self.prompt_logprobs or self.prompt_top > 0


def sample_of(request: Any, backend: Backend, adapter: str | bool) -> SampleRequest:
    """
    Args:
        request: the SDK's SampleRequest.

    Raises:
        ApiError, UserError: what is wrong with it.
    """
    for name, remedy in _UNSUPPORTED.items():
        if getattr(request, name):
            raise bad(f"{name} is not supported by this server; {remedy}", name)
    if not 1 <= request.num_samples <= MOST_SAMPLES:
        raise bad(f"num_samples is {request.num_samples}, required 1 to {MOST_SAMPLES}", "num_samples")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= TOP:
            raise bad(f"{name} is {getattr(request, name)}, required 0 to {TOP}", name)
    prompt, last = _prompt(request.prompt, backend), request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < len(prompt)):
        raise bad(
            f"prompt_logprobs_last_n is {last}, required 1 to {len(prompt) - 1}, beside prompt_logprobs",
            "prompt_logprobs_last_n",
        )
    samples = _samples(request, prompt, backend, adapter)
    return SampleRequest(
        samples,
        request.topk_sample_logprobs,
        bool(request.prompt_logprobs),
        request.topk_prompt_logprobs,
        last,
        len(prompt) < backend.max_length,
    )


def _prompt(prompt: Any, backend: Backend) -> tuple[int, ...]:
    for chunk in prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise bad(f"the prompt has a chunk of {chunk.type}; only text is supported", "prompt")
    tokens = [token for chunk in prompt.chunks for token in chunk.tokens]
    try:
        check_tokens(np.array(tokens, np.int64), "prompt", backend)
    except OverflowError:
        raise bad("the prompt has a token that is no 64-bit number", "prompt") from None
    return tuple(tokens)


def _samples(
    request: Any, prompt: tuple[int, ...], backend: Backend, adapter: str | bool
) -> tuple[Request, ...]:
    params, room = request.sampling_params, backend.max_length - len(prompt)
    most = room if params.max_tokens is None else params.max_tokens
    # compute_logprobs of the SDK asks for one token that nobody looks at.
    scores_only = room == 0 and most == 1 and request.prompt_logprobs
    if not (1 <= most <= room or scores_only):
        raise bad(
            f"the prompt has {len(prompt)} tokens and max_tokens is {most}; this server takes at most "
            f"{backend.max_length} together, one of them to be generated",
            "sampling_params.max_tokens",
            "context_length_exceeded",
        )
    if params.top_k < -1:
        raise bad(f"top_k is {params.top_k}, required -1 or more", "sampling_params.top_k")
    stop, eos = _stops(params.stop, backend)
    made = []
    for place in range(request.num_samples):
        sampling = Sampling(
            max_new_tokens=most,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            seed=_seed(params.seed, place),
            eos=eos,
            logprobs=request.topk_sample_logprobs,
        )
        made.append(Request(prompt, sampling, adapter, stop))
    return tuple(made)


def _stops(stop: Any, backend: Backend) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Strings and tokens that end an answer."""
    if stop is None:
        return (), backend.eos
    if isinstance(stop, str):
        return (stop,), backend.eos
    if all(isinstance(one, str) for one in stop):
        return tuple(stop), backend.eos if stop else ()
    outside = [one for one in stop if not 0 <= one < backend.vocab_size]
    if outside:
        raise bad(f"stop has token {outside[0]}; the vocabulary is 0 to {backend.vocab_size - 1}", "stop")
    return (), tuple(stop)


def _seed(given: int | None, place: int) -> int:
    """Of one of a request's samples: they differ, and are the same for the same request."""
    if given is None:
        return secrets.randbits(63)
    return int.from_bytes(hashlib.blake2b(f"{given}:{place}".encode(), digest_size=8).digest()) >> 1
