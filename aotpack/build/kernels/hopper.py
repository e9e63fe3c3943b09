"""``dflash`` for Hopper, warp-specialised: one warp loads tiles while two groups of four warps multiply.

A kernel has the parameters of the one of its name in ``dflash`` and computes the same;
``aotpack.build.launch`` compiles it in that one's stead where ``warp_specialised`` is set. Each group has 64
of a program's 128 rows. It multiplies a tile of keys together with what it made of the tile before, and while
it weighs the products, the other group multiplies.

Written in Gluon, in which triton leaves layouts, shared memory and barriers to the kernel. A ring is (tiles,
ready, free): a tile is loaded into a slot once the slot's ``free`` says that both groups have read what was
there, and read once its ``ready`` says that it is loaded. ``i`` counts tiles; a barrier is waited for by the
parity of how often the ring has gone round.

Source: Shah et al., FlashAttention-3, algorithms 1 and 2.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from aotpack.build.kernels.dflash import _interval, _keys_of_rows, _rows, _seen, _start_of

__all__ = ["backward_queries", "forward"]


@gluon.jit
def _ring(source, rows: gl.constexpr, dim: gl.constexpr, slots: gl.constexpr):
    tiles = gl.allocate_shared_memory(source.dtype, [slots, 1, rows, dim], source.layout)
    ready = mbarrier.allocate_mbarrier(batch=slots)
    free = mbarrier.allocate_mbarrier(batch=slots)
    for slot in gl.static_range(slots):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    return tiles, ready, free


@gluon.jit
def _load(source, ring, i, head, row, slots: gl.constexpr):
    tiles, ready, free = ring
    slot = i % slots
    mbarrier.wait(free.index(slot), (i // slots & 1) ^ 1)
    mbarrier.expect(ready.index(slot), source.nbytes_per_cta)
    tma.async_load(source, [head, row, 0], ready.index(slot), tiles.index(slot))


@gluon.jit
def _loaded(ring, i, rows: gl.constexpr, dim: gl.constexpr, slots: gl.constexpr):
    tiles, ready, _ = ring
    mbarrier.wait(ready.index(i % slots), i // slots & 1)
    return tiles.index(i % slots).reshape((rows, dim))


@gluon.jit
def _products(rows, ring, i, nothing, dim: gl.constexpr, slots: gl.constexpr):
    """Begins to multiply 64 rows by those of the i-th tile."""
    tile = _loaded(ring, i, nothing.shape[1], dim, slots)
    return warpgroup_mma(rows, tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _sums(weights, ring, i, acc, slots: gl.constexpr):
    """Begins to add to ``acc`` the rows of the i-th tile, weighed."""
    tile = _loaded(ring, i, weights.shape[1], acc.shape[1], slots)
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(gl.convert_layout(weights, left), tile, acc, is_async=True)


@gluon.jit
def _release(ring, i, slots: gl.constexpr):
    _, _, free = ring
    mbarrier.arrive(free.index(i % slots), count=1)


@gluon.jit
def _load_all(k, v, keys, values, count, outlook, head, block_n: gl.constexpr, slots: gl.constexpr):
    for i in range(count):
        start, _ = _start_of(i, outlook, block_n)
        _load(k, keys, i, head, start, slots)
        _load(v, values, i, head, start, slots)


@gluon.jit
def _outlook(ends_ptr, first_row, context, query, size: gl.constexpr, window: gl.constexpr,
             block_m: gl.constexpr, block_n: gl.constexpr):  # fmt: skip
    """How many tiles of keys a tile of rows multiplies, and its outlook."""
    rows = first_row + gl.arange(0, block_m, layout=gl.BlockedLayout([1], [32], [4], [0]))
    ends = gl.load(ends_ptr + rows // size, mask=rows < query, other=-1)
    count, _, outlook = _keys_of_rows(ends, first_row, context, query, size, window, block_m, block_n)
    # Rows that see nothing multiply one tile, whatever it has: nobody looks at the result.
    return tl.maximum(count, 1), outlook


@gluon.constexpr_function
def _products_layout(columns):
    """Of a group's products, and of sums of them: 64 rows, 16 to a warp."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _places(row, query, dim: gl.constexpr):
    """Where 64 rows are read and written, several of their elements a thread, and which of them there are."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    at = rows[:, None] * dim + gl.arange(0, dim, layout=gl.SliceLayout(0, layout))[None, :]
    return at, (rows < query)[:, None]


@gluon.jit
def _hidden(scores, rows, ends, i, outlook, size: gl.constexpr, window: gl.constexpr):
    """The scores, -inf where a row does not see a key."""
    block_n: gl.constexpr = scores.shape[1]
    cuts, _, _, _, _, _, context = outlook
    if i < cuts:
        start, drafted = _start_of(i, outlook, block_n)
        low, high = _interval(rows, ends, drafted, context, size, window)
        places = start + gl.arange(0, block_n, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(_seen(places, low, high), scores, float("-inf"))
    return scores


@gluon.jit
def _attend(
    pointers, queries, keys, values, query, row, count, outlook,
    dim: gl.constexpr, size: gl.constexpr, window: gl.constexpr, scale: gl.constexpr,
    block_n: gl.constexpr, slots: gl.constexpr,
):  # fmt: skip
    """One group's part of ``forward``; pointers are to its head and batch entry."""
    q_ptr, ends_ptr, out_ptr, lse_ptr = pointers
    kind: gl.constexpr = q_ptr.dtype.element_ty
    by_keys: gl.constexpr = _products_layout(block_n)
    by_dim: gl.constexpr = _products_layout(dim)

    at, here = _places(row, query, dim)
    queries.store(gl.load(q_ptr + at, mask=here, other=0.0))
    fence_async_shared()
    gl.barrier()
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, by_keys))
    ends = gl.load(ends_ptr + rows // size, mask=rows < query, other=-1)

    acc = gl.zeros([64, dim], gl.float32, layout=by_dim)
    nothing = gl.zeros([64, block_n], gl.float32, layout=by_keys)
    scores = _products(queries, keys, 0, nothing, dim, slots)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _release(keys, 0, slots)
    scores = _hidden(scores, rows, ends, 0, outlook, size, window)
    # Finite, so that a row that has seen nothing yet keeps its weights of 0.
    most = gl.maximum(gl.max(scores, 1) * scale, -3.0e38)
    weights = gl.exp2(scores * scale - most[:, None])
    total = gl.sum(weights, 1)
    weights = weights.to(kind)
    for i in range(1, count):
        scores = _products(queries, keys, i, nothing, dim, slots)
        acc = _sums(weights, values, i - 1, acc, slots)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _release(keys, i, slots)
        scores = _hidden(scores, rows, ends, i, outlook, size, window)
        greater = gl.maximum(most, gl.max(scores, 1) * scale)
        fresh = gl.exp2(scores * scale - greater[:, None])
        decay = gl.exp2(most - greater)
        total = total * decay + gl.sum(fresh, 1)
        most = greater
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _release(values, i - 1, slots)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, by_dim))[:, None]
        weights = fresh.to(kind)
    acc = _sums(weights, values, count - 1, acc, slots)

    kept = ends >= 0
    total = gl.where(kept, total, 1.0)
    lse = gl.where(kept, (most + gl.log2(total)) * 0.6931471805599453, float("-inf"))
    gl.store(lse_ptr + rows, lse, mask=rows < query)
    out = warpgroup_mma_wait(0, deps=(acc,))
    out = out / gl.convert_layout(total, gl.SliceLayout(1, by_dim))[:, None]
    out = gl.where(gl.convert_layout(kept, gl.SliceLayout(1, by_dim))[:, None], out, 0.0)
    gl.store(out_ptr + at, gl.convert_layout(out.to(kind), at.type.layout), mask=here)


@gluon.jit
def forward(
    q_ptr, k, v, ends_ptr, out_ptr, lse_ptr, query, key, blocks,
    heads: gl.constexpr, kv_heads: gl.constexpr, dim: gl.constexpr, size: gl.constexpr, window: gl.constexpr,
    scale: gl.constexpr, block_m: gl.constexpr, block_n: gl.constexpr, stages: gl.constexpr,
    tma: gl.constexpr, warp_specialised: gl.constexpr, abreast: gl.constexpr,
):  # fmt: skip
    """As in ``dflash``."""
    b, head, kv_head, row = _rows(query, heads, kv_heads, abreast, block_m)
    ends_ptr += b.to(gl.int64) * blocks
    count, outlook = _outlook(ends_ptr, row, key - query, query, size, window, block_m, block_n)
    q_ptr += head * (query * dim)
    out_ptr += head * (query * dim)
    lse_ptr += head * query

    keys, values = _ring(k, block_n, dim, stages), _ring(v, block_n, dim, stages)
    queries = gl.allocate_shared_memory(k.dtype, [2, 64, dim], gl.NVMMASharedLayout(128, 16))
    pointers = (q_ptr, ends_ptr, out_ptr, lse_ptr)
    gl.warp_specialize(
        [
            (
                _attend,
                (pointers, queries.index(0), keys, values, query, row, count, outlook,
                 dim, size, window, scale, block_n, stages),
            ),
            (
                _attend,
                (pointers, queries.index(1), keys, values, query, row + 64, count, outlook,
                 dim, size, window, scale, block_n, stages),
            ),
            (_load_all, (k, v, keys, values, count, outlook, kv_head, block_n, stages)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _descend(
    pointers, queries, grads, keys, values, query, row, count, outlook,
    dim: gl.constexpr, size: gl.constexpr, window: gl.constexpr, scale: gl.constexpr, factor: gl.constexpr,
    block_n: gl.constexpr, slots: gl.constexpr,
):  # fmt: skip
    """One group's part of ``backward_queries``; pointers are to its head and batch entry."""
    q_ptr, ends_ptr, out_ptr, lse_ptr, grad_ptr, grad_lse_ptr, dq_ptr, shift_ptr, delta_ptr = pointers
    kind: gl.constexpr = q_ptr.dtype.element_ty
    by_keys: gl.constexpr = _products_layout(block_n)
    by_dim: gl.constexpr = _products_layout(dim)

    at, here = _places(row, query, dim)
    grad = gl.load(grad_ptr + at, mask=here, other=0.0)
    out = gl.load(out_ptr + at, mask=here, other=0.0)
    queries.store(gl.load(q_ptr + at, mask=here, other=0.0))
    grads.store(grad)
    fence_async_shared()
    gl.barrier()
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, by_keys))
    ends = gl.load(ends_ptr + rows // size, mask=rows < query, other=-1)
    kept = ends >= 0
    delta = gl.convert_layout(gl.sum(grad.to(gl.float32) * out.to(gl.float32), 1), rows.type.layout)
    delta = gl.where(kept, delta - gl.load(grad_lse_ptr + rows, mask=rows < query, other=0.0), 0.0)
    lse = gl.load(lse_ptr + rows, mask=rows < query, other=0.0)
    lse = gl.where(kept, lse * 1.4426950408889634, float("inf"))
    gl.store(delta_ptr + rows, -delta)
    gl.store(shift_ptr + rows, lse * (-1 / scale))

    dq = gl.zeros([64, dim], gl.float32, layout=by_dim)
    nothing = gl.zeros([64, block_n], gl.float32, layout=by_keys)
    scores = _products(queries, keys, 0, nothing, dim, slots)
    products = _products(grads, values, 0, nothing, dim, slots)
    scores, products = warpgroup_mma_wait(0, deps=(scores, products))
    _release(values, 0, slots)
    scores = _hidden(scores, rows, ends, 0, outlook, size, window)
    slope = (gl.exp2(scores * scale - lse[:, None]) * (products - delta[:, None])).to(kind)
    for i in range(1, count):
        scores = _products(queries, keys, i, nothing, dim, slots)
        products = _products(grads, values, i, nothing, dim, slots)
        dq = _sums(slope, keys, i - 1, dq, slots)
        scores, products = warpgroup_mma_wait(1, deps=(scores, products))
        _release(values, i, slots)
        scores = _hidden(scores, rows, ends, i, outlook, size, window)
        fresh = gl.exp2(scores * scale - lse[:, None]) * (products - delta[:, None])
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _release(keys, i - 1, slots)
        slope = fresh.to(kind)
    dq = _sums(slope, keys, count - 1, dq, slots)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    gl.store(dq_ptr + at, gl.convert_layout((dq * factor).to(kind), at.type.layout), mask=here)


@gluon.jit
def backward_queries(
    q_ptr, k, v, ends_ptr, out_ptr, lse_ptr, grad_ptr, grad_lse_ptr, dq_ptr, shift_ptr, delta_ptr,
    query, key, blocks,
    heads: gl.constexpr, kv_heads: gl.constexpr, dim: gl.constexpr, size: gl.constexpr, window: gl.constexpr,
    scale: gl.constexpr, factor: gl.constexpr, block_m: gl.constexpr, block_n: gl.constexpr,
    stages: gl.constexpr, tma: gl.constexpr, warp_specialised: gl.constexpr, abreast: gl.constexpr,
):  # fmt: skip
    """As in ``dflash``."""
    b, head, kv_head, row = _rows(query, heads, kv_heads, abreast, block_m)
    ends_ptr += b.to(gl.int64) * blocks
    count, outlook = _outlook(ends_ptr, row, key - query, query, size, window, block_m, block_n)
    q_ptr += head * (query * dim)
    out_ptr += head * (query * dim)
    grad_ptr += head * (query * dim)
    dq_ptr += head * (query * dim)
    lse_ptr += head * query
    grad_lse_ptr += head * query
    padded = gl.cdiv(query, 128) * 128
    shift_ptr += head * padded
    delta_ptr += head * padded

    keys, values = _ring(k, block_n, dim, stages), _ring(v, block_n, dim, stages)
    queries = gl.allocate_shared_memory(k.dtype, [2, 64, dim], gl.NVMMASharedLayout(128, 16))
    grads = gl.allocate_shared_memory(k.dtype, [2, 64, dim], gl.NVMMASharedLayout(128, 16))
    pointers = (q_ptr, ends_ptr, out_ptr, lse_ptr, grad_ptr, grad_lse_ptr, dq_ptr, shift_ptr, delta_ptr)
    gl.warp_specialize(
        [
            (
                _descend,
                (pointers, queries.index(0), grads.index(0), keys, values, query, row, count, outlook,
                 dim, size, window, scale, factor, block_n, stages),
            ),
            (
                _descend,
                (pointers, queries.index(1), grads.index(1), keys, values, query, row + 64, count, outlook,
                 dim, size, window, scale, factor, block_n, stages),
            ),
            (_load_all, (k, v, keys, values, count, outlook, kv_head, block_n, stages)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
