"""x on its way from shared to tensor memory, scaled: from tokens of features to features of tokens. For chunk_state."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, range_constexpr

from ..arithmetic import mul2, numeric, widen
from ..dims import WARP
from .config import STATE_TOKENS, Chunked

T = STATE_TOKENS


def rows_of_lane(config: Chunked, x: Any, warp: Any, lane: Any) -> list[Any]:
    """Where in a stage this lane's row of ldmatrix begins, for both halves of the warp's rows of headdim: four
    matrices of 8 tokens x 8 features, two of each. The swizzle moves 16-byte pieces by the row of eight."""
    block, P = config.state_sizes.block, config.headdim
    found = []
    token = (lane >> 4) * 8 + (lane & 7)
    for half in range(2):
        row = warp * WARP + half * 16
        feature = row % P + ((lane >> 3) & 1) * 8
        offset = token * block * 2 + feature % block * 2
        bits = {64: 7, 32: 3, 16: 1}[block] << 4
        offset = offset ^ ((offset >> 3) & bits)
        start = (row // P * P + row % P // block * block) * T * 2
        found.append(x + start + offset)
    return found


@cute.jit
def scale_rows(
    config: Constexpr, source: Int32, target: Int32, weights: cute.Tensor, valid: Int32, lane: Int32
) -> None:
    """T tokens of 16 rows of headdim. A matrix of ldmatrix, transposed, has a row's two neighbouring tokens in a
    register: that is what tcgen05.st 16x128b writes to a column, so nothing moves between lanes."""
    words = cute.make_rmem_tensor(T // 4, Int32)
    for k in range_constexpr(T // 16):
        found = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[source + k * 16 * config.state_sizes.block * 2],
        )
        for r in range_constexpr(4):
            words[4 * k + r] = found[r]
    if valid < T:
        # Tokens of others: not even their NaNs may come through, so they are cut off, not multiplied by 0.
        for j in range_constexpr(T // 8):
            left = valid - (j * 8 + (lane & 3) * 2)
            keep = Int32(cutlass.select_(left > 1, Int32(-1), Int32(cutlass.select_(left > 0, 0xFFFF, 0))))
            words[2 * j] = words[2 * j] & keep
            words[2 * j + 1] = words[2 * j + 1] & keep
    packed = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=numeric(config.dtype)), cute.make_layout(T // 2))
    scaled = cute.make_rmem_tensor(T // 2, Float32)
    scaled.store(widen(packed))
    for r in range_constexpr(T // 4):
        pair = (scaled[2 * r], scaled[2 * r + 1])
        scaled[2 * r], scaled[2 * r + 1] = mul2(True, pair, (weights[0, r // 2], weights[1, r // 2]))
    packed.store(scaled.load().to(numeric(config.dtype)))
    store_rows(target, [words[r] for r in range(T // 4)])


def store_rows(where: Any, words: list[Any]) -> None:
    """T tokens of 16 lanes to tensor memory; word 2j + v goes to lane / 4 + 8v, column lane % 4 + 4j."""
    names = ", ".join(f"{{$r{k + 1}}}" for k in range(len(words)))
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.16x128b.x8.b32 [{{$r0}}], {{{names}}};", read_only_args=[where, *words]
    )
