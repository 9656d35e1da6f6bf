"""What torch's own functions of a state that goes from token to token keep for backward: on a CPU, and on a
GPU without the package that has kernels. They differ by kind, and are many times what attention over keys
keeps.

Counted from the functions of transformers 5 that each names: every tensor that autograd saves, once.
"""

from __future__ import annotations

from kt_ray.dims.model_dims import StateValues

_DELTA_CHUNK = 64  # tokens, of both delta rules


def gated_delta(key_heads: int, key: int, heads: int, value: int) -> StateValues:
    """`torch_chunk_gated_delta_rule` of Qwen3-Next, with its convolution and gated norm.

    Of keys and values, and of the pairs of tokens in a chunk: decays, scores of keys and of queries before
    and after them. A chunk has a state.
    """
    keys, values = heads * key, heads * value  # heads of values repeat those of keys
    convolved = 2 * key_heads * key + values
    pairs = heads * _DELTA_CHUNK
    return StateValues(
        plain=2 * convolved + values,
        wide=2 * keys + 3 * values + 3 * heads,
        chunked=6 * keys + 3 * values + 5 * pairs + keys * value / _DELTA_CHUNK + 5 * heads,
        chunk=_DELTA_CHUNK,
        package="fla",
    )


def kimi_delta(heads: int, head: int) -> StateValues:
    """`chunk_kimi_delta_attention` of Kimi-Linear, with its convolution, forget gate and gated norm.

    Each feature decays by itself, so three tensors have every feature of every pair of tokens in a chunk; and
    the inverse of a chunk's triangle is found row by row, of which each keeps all rows before it.
    """
    width, chunk = heads * head, _DELTA_CHUNK
    rows = heads * (chunk**2 - 1) / 3
    return StateValues(
        plain=6 * width + heads,
        wide=7 * width + 2 * heads,
        chunked=3 * chunk * width + rows + 2 * chunk * heads + 13 * width + width * head / chunk + heads,
        chunk=chunk,
        package="fla",
    )


def mamba2(heads: int, head: int, groups: int, state: int, chunk: int) -> StateValues:
    """`mamba2_chunk_scan` of GraniteMoeHybrid and Nemotron-H, with the convolution and gated norm.

    Its products copy what they take of B and C into an order of their own, where a micro-batch has more than
    one chunk.
    """
    inner, states = heads * head, heads * state
    convolved = inner + 2 * groups * state
    return StateValues(
        plain=(inner + convolved + heads) + convolved + inner + 2 * heads,
        wide=4 * inner + heads,
        chunked=3 * inner + 5 * states + 3 * heads * chunk + 2 * inner * state / chunk + 2 * heads,
        chunk=chunk,
        row=2 * inner * state + chunk**2 / 2,  # the first state, and two masks of a chunk
        package="mamba_ssm",
    )


def mamba(inner: int, state: int, rank: int) -> StateValues:
    """`mamba_selective_scan` of Jamba: each token keeps all states."""
    return StateValues(
        plain=8 * inner + 2 * state + 2 * rank,
        wide=3 * inner * state + 2 * inner + 3 * state + rank,
        rounded=inner * state,
        package="mamba_ssm",
    )


def lightning(heads: int, head: int, block: int) -> StateValues:
    """`MiniMaxLightningAttention`: the scores of a block."""
    width = heads * head
    return StateValues(plain=10 * width + width * head / block, wide=width, pairs=heads, chunk=block)


def short_convolution(hidden: int) -> StateValues:
    """`Lfm2MoeShortConv`: its gates, what they give, and the convolution."""
    return StateValues(plain=5 * hidden)
