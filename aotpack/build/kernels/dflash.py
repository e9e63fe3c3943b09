"""Attention of a DFlash drafter in Triton: what a query row sees is one interval of the context and one of drafts.

Row ``r`` of the query axis belongs to block ``r // size``; ``ends[b, block]`` is the block's anchor, below
which its rows see the context, or -1 for a block that is not kept. It also sees the drafted keys of its own
block, which follow the context. With a window, the lower bound of the first interval and the upper bound of the
second move with the row.

So a tile of rows and a tile of keys is hidden, visible as a whole, or cut, and which it is follows from the
least and the greatest of some ends: no lists, and no arithmetic on masks but in the tiles that are cut. Rows of
blocks that are not kept never make a tile a cut one. Their log-sum-exp is -inf, which the backward turns into
weights of 0.

Sizes are in rows or keys: q, out and their gradients are [batch, heads, query, dim], k, v and theirs
[batch, kv_heads, key, dim], lse and delta float32 [batch, heads, query], ends int32 [batch, blocks]. An offset
inside a head fits 32 bits, one between heads need not.

Source of the arithmetic: Dao, FlashAttention-2, algorithms 1 and 2, with powers of 2 for those of e, and with
delta less the gradient of the log-sum-exp.
"""

import triton
import triton.language as tl

__all__ = ["backward_keys", "backward_queries", "forward"]


@triton.jit
def _row_interval(rows, ends, drafted, context, query, size: tl.constexpr, window: tl.constexpr):
    """Keys [low, high) that rows see of the context, or, where ``drafted``, of the drafts."""
    block = rows // size
    kept = ends >= 0
    low = tl.where(drafted, context + block * size, 0)
    if window is None:
        high = tl.where(drafted, context + (block + 1) * size, ends)
    else:
        high = tl.where(drafted, context + rows + 1, ends)
        low = tl.where(drafted, low, ends + (rows - block * size) - (window - 1))
    return low, tl.where(kept, high, 0)


@triton.jit
def _key_tiles(ends, context, first_row, query, size: tl.constexpr, window: tl.constexpr,
               block_m: tl.constexpr, block_n: tl.constexpr):  # fmt: skip
    """How a tile of rows sees the keys: (first tile, first whole, after the whole, after the last) of the
    context, in tiles, and (first draft, after the last draft) in drafts."""
    kept = ends >= 0
    least = tl.min(tl.where(kept, ends, context), 0)
    most = tl.max(ends, 0)
    begin = 0
    whole = 0
    if window is not None:
        begin = tl.maximum(least - (window - 1), 0) // block_n
        whole = tl.maximum(most + size - window, 0)
        whole = (whole + block_n - 1) // block_n
    end = (tl.maximum(most, 0) + block_n - 1) // block_n
    whole_end = tl.maximum(tl.minimum(least // block_n, end), whole)
    whole = tl.minimum(whole, end)
    whole_end = tl.minimum(whole_end, end)
    draft = first_row // size * size
    draft_end = tl.minimum(((first_row + block_m - 1) // size + 1) * size, query)
    draft_end = tl.where(most >= 0, draft_end, draft)
    return begin, whole, whole_end, end, draft, draft_end


@triton.jit
def _cut_tile(i, begin, whole, whole_end, end, draft, context, block_n: tl.constexpr):
    """First key of the i-th tile that is cut, and whether it is one of drafts."""
    cut = end - begin - (whole_end - whole)
    tile = begin + i
    tile = tl.where(tile >= whole, tile + (whole_end - whole), tile)
    drafted = i >= cut
    return tl.where(drafted, context + draft + (i - cut) * block_n, tile * block_n), drafted


@triton.jit
def _weigh(scores, acc, total, most, v, scale: tl.constexpr, cut: tl.constexpr):
    """One step of the online softmax; ``cut`` rows may have seen nothing yet."""
    greater = tl.maximum(most, tl.max(scores, 1) * scale)
    shift = greater
    if cut:
        shift = tl.where(greater == float("-inf"), 0.0, greater)
    weights = tl.exp2(scores * scale - shift[:, None])
    keep = tl.exp2(most - shift)
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None])
    return acc, total, greater


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, ends_ptr, out_ptr, lse_ptr, batch, query, key, blocks,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, size: tl.constexpr, window: tl.constexpr,
    scale: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """out and the natural log-sum-exp of a tile of rows of one head; ``scale`` is to base 2."""
    # Heads that share keys run side by side; the last rows, which see most as anchors ascend, come first.
    place = tl.program_id(0) % (batch * heads)
    tile = tl.cdiv(query, block_m) - 1 - tl.program_id(0) // (batch * heads)
    b = place // heads
    head = place.to(tl.int64)
    kv_head = (b * kv_heads + place % heads // (heads // kv_heads)).to(tl.int64)
    k_ptr += kv_head * (key * dim)
    v_ptr += kv_head * (key * dim)
    context = key - query

    rows = tile * block_m + tl.arange(0, block_m)
    dims = tl.arange(0, dim)
    keys = tl.arange(0, block_n)
    here = rows < query
    ends = tl.load(ends_ptr + b * blocks + rows // size, mask=here, other=-1)
    at = head * (query * dim) + rows[:, None] * dim + dims[None, :]
    q = tl.load(q_ptr + at, mask=here[:, None], other=0.0)
    begin, whole, whole_end, end, draft, draft_end = _key_tiles(
        ends, context, tile * block_m, query, size, window, block_m, block_n
    )

    acc = tl.zeros([block_m, dim], tl.float32)
    total = tl.zeros([block_m], tl.float32)
    most = tl.full([block_m], float("-inf"), tl.float32)
    cut = end - begin - (whole_end - whole) + tl.cdiv(draft_end - draft, block_n)
    for i in tl.range(0, cut, num_stages=1):
        start, drafted = _cut_tile(i, begin, whole, whole_end, end, draft, context, block_n)
        low, high = _row_interval(rows, ends, drafted, context, query, size, window)
        places = start + keys
        there = (places < key)[:, None]
        from_key = places[:, None] * dim + dims[None, :]
        k = tl.load(k_ptr + from_key, mask=there, other=0.0)
        v = tl.load(v_ptr + from_key, mask=there, other=0.0)
        seen = (places[None, :] >= low[:, None]) & (places[None, :] < high[:, None])
        scores = tl.where(seen, tl.dot(q, k.T), float("-inf"))
        acc, total, most = _weigh(scores, acc, total, most, v, scale, True)
    # A row of a block that is kept has seen itself by now.
    most = tl.where(most == float("-inf"), 0.0, most)
    k_ptr += keys[:, None] * dim + dims[None, :]
    v_ptr += keys[:, None] * dim + dims[None, :]
    for i in tl.range(whole, whole_end, num_stages=stages):
        k = tl.load(k_ptr + i * block_n * dim)
        v = tl.load(v_ptr + i * block_n * dim)
        acc, total, most = _weigh(tl.dot(q, k.T), acc, total, most, v, scale, False)

    kept = ends >= 0
    total = tl.where(kept, total, 1.0)
    out = tl.where(kept[:, None], acc / total[:, None], 0.0)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=here[:, None])
    lse = tl.where(kept, (most + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + head * query + rows, lse, mask=here)


@triton.jit
def _base2(lse):
    """The log-sum-exp to base 2, and +inf for empty rows, whose weights are 0 then."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def backward_queries(
    q_ptr, k_ptr, v_ptr, ends_ptr, out_ptr, lse_ptr, grad_ptr, grad_lse_ptr, dq_ptr, delta_ptr,
    batch, query, key, blocks,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, size: tl.constexpr, window: tl.constexpr,
    scale: tl.constexpr, factor: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """dq and delta of a tile of rows of one head; ``scale`` is to base 2 and ``factor`` to base e."""
    place = tl.program_id(0) % (batch * heads)
    tile = tl.cdiv(query, block_m) - 1 - tl.program_id(0) // (batch * heads)
    b = place // heads
    head = place.to(tl.int64)
    kv_head = (b * kv_heads + place % heads // (heads // kv_heads)).to(tl.int64)
    k_ptr += kv_head * (key * dim)
    v_ptr += kv_head * (key * dim)
    context = key - query

    rows = tile * block_m + tl.arange(0, block_m)
    dims = tl.arange(0, dim)
    keys = tl.arange(0, block_n)
    here = rows < query
    ends = tl.load(ends_ptr + b * blocks + rows // size, mask=here, other=-1)
    at = head * (query * dim) + rows[:, None] * dim + dims[None, :]
    grad = tl.load(grad_ptr + at, mask=here[:, None], other=0.0)
    out = tl.load(out_ptr + at, mask=here[:, None], other=0.0)
    row = head * query + rows
    kept = ends >= 0
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    delta = tl.where(kept, delta - tl.load(grad_lse_ptr + row, mask=here, other=0.0), 0.0)
    tl.store(delta_ptr + row, delta, mask=here)
    lse = _base2(tl.load(lse_ptr + row, mask=here, other=float("-inf")))
    q = tl.load(q_ptr + at, mask=here[:, None], other=0.0)
    begin, whole, whole_end, end, draft, draft_end = _key_tiles(
        ends, context, tile * block_m, query, size, window, block_m, block_n
    )

    dq = tl.zeros([block_m, dim], tl.float32)
    cut = end - begin - (whole_end - whole) + tl.cdiv(draft_end - draft, block_n)
    for i in tl.range(0, cut, num_stages=1):
        start, drafted = _cut_tile(i, begin, whole, whole_end, end, draft, context, block_n)
        low, high = _row_interval(rows, ends, drafted, context, query, size, window)
        places = start + keys
        there = (places < key)[:, None]
        from_key = places[:, None] * dim + dims[None, :]
        k = tl.load(k_ptr + from_key, mask=there, other=0.0)
        v = tl.load(v_ptr + from_key, mask=there, other=0.0)
        seen = (places[None, :] >= low[:, None]) & (places[None, :] < high[:, None])
        weights = tl.where(seen, tl.exp2(tl.dot(q, k.T) * scale - lse[:, None]), 0.0)
        slope = weights * (tl.dot(grad, v.T) - delta[:, None])
        dq = tl.dot(slope.to(k.dtype), k, dq)
    k_ptr += keys[:, None] * dim + dims[None, :]
    v_ptr += keys[:, None] * dim + dims[None, :]
    for i in tl.range(whole, whole_end, num_stages=stages):
        k = tl.load(k_ptr + i * block_n * dim)
        v = tl.load(v_ptr + i * block_n * dim)
        weights = tl.exp2(tl.dot(q, k.T) * scale - lse[:, None])
        slope = weights * (tl.dot(grad, v.T) - delta[:, None])
        dq = tl.dot(slope.to(k.dtype), k, dq)
    tl.store(dq_ptr + at, (dq * factor).to(dq_ptr.dtype.element_ty), mask=here[:, None])


@triton.jit
def _blocks_that_see(ends_ptr, blocks, start, stop, size: tl.constexpr, window: tl.constexpr):
    """Of the keys [start, stop) of the context: the blocks [first, last) see some of them, and of those in
    [whole, whole_end) each that is kept sees them all."""
    first = blocks
    last = blocks * 0
    whole = blocks * 0
    whole_end = blocks
    for chunk in range(0, blocks, 512):
        block = chunk + tl.arange(0, 512)
        ends = tl.load(ends_ptr + block, mask=block < blocks, other=-1)
        kept = ends >= 0
        seen = kept & (ends > start)
        if window is not None:
            seen = seen & (ends - (window - 1) < stop)
            late = kept & (ends + size - window > start)
            whole_end = tl.minimum(whole_end, tl.min(tl.where(late, block, blocks), 0))
        first = tl.minimum(first, tl.min(tl.where(seen, block, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(seen, block + 1, 0), 0))
        whole = tl.maximum(whole, tl.max(tl.where(kept & (ends < stop), block + 1, 0), 0))
    last = tl.maximum(first, last)
    whole = tl.minimum(tl.maximum(whole, first), last)
    return first, last, whole, tl.maximum(whole, tl.minimum(whole_end, last))


@triton.jit
def backward_keys(
    q_ptr, k_ptr, v_ptr, ends_ptr, lse_ptr, grad_ptr, delta_ptr, dk_ptr, dv_ptr,
    batch, query, key, blocks,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, size: tl.constexpr, window: tl.constexpr,
    scale: tl.constexpr, factor: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, of the context or of drafts, over all query heads that share them."""
    group: tl.constexpr = heads // kv_heads
    place = tl.program_id(0) % (batch * kv_heads)
    tile = tl.program_id(0) // (batch * kv_heads)
    b = place // kv_heads
    kv_head = place.to(tl.int64)
    head = (b * heads + place % kv_heads * group).to(tl.int64)
    context = key - query
    q_ptr += head * (query * dim)
    grad_ptr += head * (query * dim)
    lse_ptr += head * query
    delta_ptr += head * query

    # Tiles of the context come first: the first keys are seen by most rows.
    of_context = tl.cdiv(context, block_n)
    drafted = tile >= of_context
    start = tl.where(drafted, context + (tile - of_context) * block_n, tile * block_n)
    stop = tl.minimum(start + block_n, tl.where(drafted, key, context))
    places = start + tl.arange(0, block_n)
    dims = tl.arange(0, dim)
    here = places < stop
    at = kv_head * (key * dim) + places[:, None] * dim + dims[None, :]
    k = tl.load(k_ptr + at, mask=here[:, None], other=0.0)
    v = tl.load(v_ptr + at, mask=here[:, None], other=0.0)

    first = (start - context) // size
    last = (stop - 1 - context) // size + 1
    whole = first
    whole_end = first
    if not drafted:
        first, last, whole, whole_end = _blocks_that_see(
            ends_ptr + b * blocks, blocks, start, stop, size, window
        )
    begin = first * size // block_m
    end = (last * size + block_m - 1) // block_m
    end = tl.maximum(end, begin)
    whole_tile = tl.minimum((whole * size + block_m - 1) // block_m, end)
    whole_tile = tl.maximum(whole_tile, begin)
    wholes = tl.maximum(whole_end * size // block_m - whole_tile, 0)
    cuts = end - begin - wholes

    dk = tl.zeros([block_n, dim], tl.float32)
    dv = tl.zeros([block_n, dim], tl.float32)
    in_tile = tl.arange(0, block_m)
    for i in tl.range(0, cuts * group, num_stages=1):
        h = i // cuts
        m = begin + i - h * cuts
        m = tl.where(m >= whole_tile, m + wholes, m)
        rows = m * block_m + in_tile
        there = rows < query
        ends = tl.load(ends_ptr + b * blocks + rows // size, mask=there, other=-1)
        low, high = _row_interval(rows, ends, drafted, context, query, size, window)
        row = h * query + rows
        from_row = row[:, None] * dim + dims[None, :]
        q = tl.load(q_ptr + from_row, mask=there[:, None], other=0.0)
        grad = tl.load(grad_ptr + from_row, mask=there[:, None], other=0.0)
        lse = _base2(tl.load(lse_ptr + row, mask=there, other=float("-inf")))
        delta = tl.load(delta_ptr + row, mask=there, other=0.0)
        seen = (places[:, None] >= low[None, :]) & (places[:, None] < high[None, :])
        weights = tl.where(seen, tl.exp2(tl.dot(k, q.T) * scale - lse[None, :]), 0.0)
        dv = tl.dot(weights.to(grad.dtype), grad, dv)
        slope = weights * (tl.dot(v, grad.T) - delta[None, :])
        dk = tl.dot(slope.to(q.dtype), q, dk)
    tile_ptr = in_tile[:, None] * dim + dims[None, :]
    for i in tl.range(0, wholes * group, num_stages=stages):
        h = i // wholes
        first_row = h * query + (whole_tile + i - h * wholes) * block_m
        q = tl.load(q_ptr + first_row * dim + tile_ptr)
        grad = tl.load(grad_ptr + first_row * dim + tile_ptr)
        lse = _base2(tl.load(lse_ptr + first_row + in_tile))
        delta = tl.load(delta_ptr + first_row + in_tile)
        weights = tl.exp2(tl.dot(k, q.T) * scale - lse[None, :])
        dv = tl.dot(weights.to(grad.dtype), grad, dv)
        slope = weights * (tl.dot(v, grad.T) - delta[None, :])
        dk = tl.dot(slope.to(q.dtype), q, dk)
    tl.store(dk_ptr + at, (dk * factor).to(dk_ptr.dtype.element_ty), mask=here[:, None])
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=here[:, None])
