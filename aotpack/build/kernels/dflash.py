"""Attention of a DFlash drafter in Triton: a query row sees an interval of the context and one of drafts.

Row ``r`` of the query axis belongs to block ``r // size``. ``ends[b, block]`` is the block's anchor, before
which its rows see the context, or -1 for a block that is not kept. They also see the keys of their own block,
which are drafts and follow the context. With a window, the lower end of the first interval and the upper end
of the second move with the row.

So a tile of keys is hidden from a tile of rows, or cut, or visible as a whole, and which it is follows from
the least and the greatest of some ends: there are no lists, and masks are evaluated in tiles that are cut
only. Rows of blocks that are not kept do not make a tile a cut one: forward empties them at the end, and in
backward their log-sum-exp of -inf makes their weights 0.

q, out and their gradients are [batch, heads, query, dim], k, v and theirs [batch, kv_heads, key, dim], lse
float32 [batch, heads, query], ends int32 [batch, blocks]. Offsets inside a head fit 32 bits, those between
heads need not. ``scale`` and the weights are to base 2, ``factor`` is the scale to base e. Parameters without
``_ptr`` are read by tiles: where ``tma`` is set they are descriptors of tiles [1, rows, dim] of a tensor
[batch * heads, length, dim], else pointers. No result depends on the order in which programs run.
``warp_specialised`` is for ``aotpack.build.launch`` to read.

Source of the arithmetic: Dao, FlashAttention-2, algorithms 1 and 2. The gradient of the log-sum-exp is taken
off delta, since both multiply the weights.
"""

import triton
import triton.language as tl

__all__ = ["backward_keys", "backward_queries", "forward"]


@triton.jit
def _place(tiles, heads: tl.constexpr, abreast: tl.constexpr):
    """Batch entry, head and tile of this program: ``abreast`` heads run at once, one tile after the other."""
    index = tl.program_id(0)
    group = index // (abreast * tiles)
    rest = index - group * (abreast * tiles)
    head = group * abreast + rest % abreast
    return head // heads, head % heads, rest // abreast


@triton.jit
def _fetch(source, head, row, length, count: tl.constexpr, dim: tl.constexpr, tma: tl.constexpr):
    """``count`` rows of a head from ``row`` on, and zeros after its last one; heads count over the batch."""
    if tma:
        tile = source.load([head, row, 0]).reshape(count, dim)
    else:
        rows = row + tl.arange(0, count)
        at = head.to(tl.int64) * (length * dim) + rows[:, None] * dim + tl.arange(0, dim)[None, :]
        tile = tl.load(source + at, mask=(rows < length)[:, None], other=0.0)
    return tile


@triton.jit
def _rows(query, heads: tl.constexpr, kv_heads: tl.constexpr, abreast: tl.constexpr, block_m: tl.constexpr):
    """Batch entry, head, head of keys and first row of this program's tile; heads count over the batch."""
    tiles = tl.cdiv(query, block_m)
    b, h, tile = _place(tiles, heads, abreast)
    head = (b * heads + h).to(tl.int64)
    kv_head = b * kv_heads + h // (heads // kv_heads)
    # Anchors mostly ascend, so the last rows see most: they come first.
    return b, head, kv_head, (tiles - 1 - tile) * block_m


@triton.jit
def _interval(rows, ends, drafted, context, size: tl.constexpr, window: tl.constexpr):
    """Keys [low, high) that each row sees of the context or, where ``drafted``, of the drafts."""
    block = rows // size
    low = tl.where(drafted, context + block * size, 0)
    if window is None:
        high = tl.where(drafted, context + (block + 1) * size, ends)
    else:
        high = tl.where(drafted, context + rows + 1, ends)
        low = tl.where(drafted, low, ends + (rows - block * size) - (window - 1))
    return low, tl.where(ends >= 0, high, 0)


@triton.jit
def _seen(places, low, high):
    """Whether each row, whose interval that is, sees each key."""
    return (places[None, :] >= low[:, None]) & (places[None, :] < high[:, None])


@triton.jit
def _keys_of_rows(ends, first_row, context, query, size: tl.constexpr, window: tl.constexpr,
                  block_m: tl.constexpr, block_n: tl.constexpr):  # fmt: skip
    """How many tiles of keys a tile of rows sees, how many of these are cut, and its outlook: the cuts again,
    the tiles [begin, end) of the context, of which [whole, whole_end) are whole, the first draft, and the
    context's length."""
    kept = ends >= 0
    least = tl.min(tl.where(kept, ends, context), 0)
    most = tl.max(ends, 0)
    begin = 0
    whole = 0
    if window is not None:
        begin = tl.maximum(least - (window - 1), 0) // block_n
        whole = tl.cdiv(tl.maximum(most + size - window, 0), block_n)
    end = tl.cdiv(tl.maximum(most, 0), block_n)
    whole = tl.minimum(whole, end)
    whole_end = tl.minimum(tl.maximum(least // block_n, whole), end)
    draft = first_row // size * size
    draft_end = tl.minimum(((first_row + block_m - 1) // size + 1) * size, query)
    draft_end = tl.where(most >= 0, draft_end, draft)
    cuts = end - begin - (whole_end - whole) + tl.cdiv(draft_end - draft, block_n)
    return cuts + whole_end - whole, cuts, (cuts, begin, whole, whole_end, end, draft, context)


@triton.jit
def _start_of(i, outlook, block_n: tl.constexpr):
    """First key of the i-th tile, and whether it is of drafts: first come the cuts, drafts last of those."""
    cuts, begin, whole, whole_end, end, draft, context = outlook
    wholes = whole_end - whole
    of_context = end - begin - wholes
    drafted = i >= of_context
    tile = begin + i + tl.where(begin + i >= whole, wholes, 0)
    start = tl.where(drafted, context + draft + (i - of_context) * block_n, tile * block_n)
    return tl.where(i < cuts, start, (whole + i - cuts) * block_n), drafted


@triton.jit
def forward(
    q_ptr, k, v, ends_ptr, out_ptr, lse_ptr, query, key, blocks,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, size: tl.constexpr, window: tl.constexpr,
    scale: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, stages: tl.constexpr,
    tma: tl.constexpr, warp_specialised: tl.constexpr, abreast: tl.constexpr,
):  # fmt: skip
    """out and the natural log-sum-exp of a tile of rows of one head."""
    b, head, kv_head, first_row = _rows(query, heads, kv_heads, abreast, block_m)
    context = key - query
    rows = first_row + tl.arange(0, block_m)
    keys = tl.arange(0, block_n)
    here = rows < query
    ends = tl.load(ends_ptr + b.to(tl.int64) * blocks + rows // size, mask=here, other=-1)
    at = head * (query * dim) + rows[:, None] * dim + tl.arange(0, dim)[None, :]
    q = tl.load(q_ptr + at, mask=here[:, None], other=0.0)
    count, cuts, outlook = _keys_of_rows(ends, first_row, context, query, size, window, block_m, block_n)

    acc = tl.zeros([block_m, dim], tl.float32)
    total = tl.zeros([block_m], tl.float32)
    # Finite, so that a row that has seen nothing yet keeps its weights of 0.
    most = tl.full([block_m], -3.0e38, tl.float32)
    for i in tl.range(0, count, num_stages=stages):
        start, drafted = _start_of(i, outlook, block_n)
        scores = tl.dot(q, _fetch(k, kv_head, start, key, block_n, dim, tma).T)
        if i < cuts:
            low, high = _interval(rows, ends, drafted, context, size, window)
            scores = tl.where(_seen(start + keys, low, high), scores, float("-inf"))
        greater = tl.maximum(most, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - greater[:, None])
        decay = tl.exp2(most - greater)
        total = total * decay + tl.sum(weights, 1)
        most = greater
        values = _fetch(v, kv_head, start, key, block_n, dim, tma)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None])

    kept = ends >= 0
    total = tl.where(kept, total, 1.0)
    out = tl.where(kept[:, None], acc / total[:, None], 0.0)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=here[:, None])
    lse = tl.where(kept, (most + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + head * query + rows, lse, mask=here)


@triton.jit
def backward_queries(
    q_ptr, k, v, ends_ptr, out_ptr, lse_ptr, grad_ptr, grad_lse_ptr, dq_ptr, shift_ptr, delta_ptr,
    query, key, blocks,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, size: tl.constexpr, window: tl.constexpr,
    scale: tl.constexpr, factor: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    stages: tl.constexpr, tma: tl.constexpr, warp_specialised: tl.constexpr, abreast: tl.constexpr,
):  # fmt: skip
    """dq of a tile of rows of one head, and what ``backward_keys`` adds to its products.

    shift and delta are float32 [batch, heads, query up to a multiple of 128]: what is added to a row's
    unscaled scores, so that they are logarithms of weights, and to its products of gradient and value.
    """
    b, head, kv_head, first_row = _rows(query, heads, kv_heads, abreast, block_m)
    context = key - query
    rows = first_row + tl.arange(0, block_m)
    keys = tl.arange(0, block_n)
    here = rows < query
    ends = tl.load(ends_ptr + b.to(tl.int64) * blocks + rows // size, mask=here, other=-1)
    at = head * (query * dim) + rows[:, None] * dim + tl.arange(0, dim)[None, :]
    grad = tl.load(grad_ptr + at, mask=here[:, None], other=0.0)
    out = tl.load(out_ptr + at, mask=here[:, None], other=0.0)
    row = head * query + rows
    kept = ends >= 0
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    delta = tl.where(kept, delta - tl.load(grad_lse_ptr + row, mask=here, other=0.0), 0.0)
    lse = tl.load(lse_ptr + row, mask=here, other=0.0)
    lse = tl.where(kept, lse * 1.4426950408889634, float("inf"))
    padded = head * (tl.cdiv(query, 128) * 128) + rows
    tl.store(delta_ptr + padded, -delta)
    tl.store(shift_ptr + padded, lse * (-1 / scale))
    q = tl.load(q_ptr + at, mask=here[:, None], other=0.0)
    count, cuts, outlook = _keys_of_rows(ends, first_row, context, query, size, window, block_m, block_n)

    dq = tl.zeros([block_m, dim], tl.float32)
    for i in tl.range(0, count, num_stages=stages):
        start, drafted = _start_of(i, outlook, block_n)
        tile_k = _fetch(k, kv_head, start, key, block_n, dim, tma)
        tile_v = _fetch(v, kv_head, start, key, block_n, dim, tma)
        scores = tl.dot(q, tile_k.T)
        if i < cuts:
            low, high = _interval(rows, ends, drafted, context, size, window)
            scores = tl.where(_seen(start + keys, low, high), scores, float("-inf"))
        weights = tl.exp2(scores * scale - lse[:, None])
        slope = weights * (tl.dot(grad, tile_v.T) - delta[:, None])
        dq = tl.dot(slope.to(tile_k.dtype), tile_k, dq)
    tl.store(dq_ptr + at, (dq * factor).to(dq_ptr.dtype.element_ty), mask=here[:, None])


@triton.jit
def _blocks_of_keys(ends_ptr, blocks, start, stop, size: tl.constexpr, window: tl.constexpr):
    """Of the keys [start, stop) of the context: blocks outside [first, last) see none of them, and those in
    [whole, whole_end) that are kept see them all."""
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
def _over(row, size: tl.constexpr):
    """That row, ``size`` times."""
    return tl.broadcast_to(row[None, :], [size, row.shape[0]])


@triton.jit
def _sight(places, rows, ends, drafted, context, size: tl.constexpr, window: tl.constexpr):
    """Bounds by which a key sees a row: low[key] <= first[row] and last[row] < high[key].

    Rows of blocks that are not kept are hidden by their weights of 0.
    """
    block = (places - context) // size
    first = tl.where(drafted, rows, ends)
    last = first
    low = tl.where(drafted, block * size, places + 1)
    high = tl.where(drafted, (block + 1) * size, 0x7FFFFFFF)
    if window is not None:
        last = tl.where(drafted, rows, ends + rows % size)
        low = tl.where(drafted, places - context, low)
        high = tl.where(drafted, high, places + window)
    return low, high, first, last


@triton.jit
def backward_keys(
    q, k, v, grad, ends_ptr, shift_ptr, delta_ptr, dk_ptr, dv_ptr, query, key, blocks,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, size: tl.constexpr, window: tl.constexpr,
    scale: tl.constexpr, factor: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    stages: tl.constexpr, tma: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, of the context or of drafts, over all query heads that share them."""
    group: tl.constexpr = heads // kv_heads
    context = key - query
    of_context = tl.cdiv(context, block_n)
    # Tiles of the context come first: most rows see the first keys.
    b, h, tile = _place(of_context + tl.cdiv(query, block_n), kv_heads, kv_heads)
    head = b * heads + h * group
    kv_head = b * kv_heads + h
    ends_ptr += b.to(tl.int64) * blocks
    padded = tl.cdiv(query, 128) * 128
    shift_ptr += head.to(tl.int64) * padded
    delta_ptr += head.to(tl.int64) * padded
    drafted = tile >= of_context
    start = tl.where(drafted, context + (tile - of_context) * block_n, tile * block_n)
    stop = tl.minimum(start + block_n, tl.where(drafted, key, context))
    tile_k = _fetch(k, kv_head, start, key, block_n, dim, tma)
    tile_v = _fetch(v, kv_head, start, key, block_n, dim, tma)

    first = (start - context) // size
    last = (stop - 1 - context) // size + 1
    whole = first
    whole_end = first
    if not drafted:
        first, last, whole, whole_end = _blocks_of_keys(ends_ptr, blocks, start, stop, size, window)
    begin = first * size // block_m
    end = tl.maximum(tl.cdiv(last * size, block_m), begin)
    whole = tl.maximum(tl.minimum(tl.cdiv(whole * size, block_m), end), begin)
    # After the last row of all there are none that would weigh anything.
    whole_end = tl.where(whole_end == blocks, end, whole_end * size // block_m)
    wholes = tl.maximum(tl.minimum(whole_end, end) - whole, 0)
    cuts = end - begin - wholes

    dk = tl.zeros([block_n, dim], tl.float32)
    dv = tl.zeros([block_n, dim], tl.float32)
    in_tile = tl.arange(0, block_m)
    for i in tl.range(0, cuts * group, num_stages=1):
        member = i // cuts
        m = begin + i - member * cuts
        row = tl.where(m >= whole, m + wholes, m) * block_m
        tile_q = _fetch(q, head + member, row, query, block_m, dim, tma)
        tile_grad = _fetch(grad, head + member, row, query, block_m, dim, tma)
        rows = row + in_tile
        ends = tl.load(ends_ptr + rows // size, mask=rows < query, other=-1)
        low, high, nearest, farthest = _sight(
            start + tl.arange(0, block_n), rows, ends, drafted, context, size, window
        )
        shift = tl.load(shift_ptr + member * padded + rows)
        scores = tl.dot(tile_k, tile_q.T, _over(shift, block_n))
        seen = (nearest[None, :] >= low[:, None]) & (farthest[None, :] < high[:, None])
        weights = tl.exp2(tl.where(seen, scores, float("-inf")) * scale)
        dv = tl.dot(weights.to(tile_grad.dtype), tile_grad, dv)
        delta = tl.load(delta_ptr + member * padded + rows)
        slope = weights * tl.dot(tile_v, tile_grad.T, _over(delta, block_n))
        dk = tl.dot(slope.to(tile_q.dtype), tile_q, dk)
    # A pipeline begins before its loop, even before one of no rounds. Dividing by 0 there would tell the
    # compiler that there are some, and it would load tiles over what the end of the kernel writes.
    each = tl.maximum(wholes, 1)
    for i in tl.range(0, wholes * group, num_stages=stages):
        member = i // each
        row = (whole + i - member * each) * block_m
        tile_q = _fetch(q, head + member, row, query, block_m, dim, tma)
        tile_grad = _fetch(grad, head + member, row, query, block_m, dim, tma)
        shift = tl.load(shift_ptr + member * padded + row + in_tile)
        delta = tl.load(delta_ptr + member * padded + row + in_tile)
        scores = tl.dot(tile_k, tile_q.T, _over(shift, block_n))
        products = tl.dot(tile_v, tile_grad.T, _over(delta, block_n))
        weights = tl.exp2(scores * scale)
        dv = tl.dot(weights.to(tile_grad.dtype), tile_grad, dv)
        dk = tl.dot((weights * products).to(tile_q.dtype), tile_q, dk)
    places = start + tl.arange(0, block_n)
    here = places < stop
    at = kv_head.to(tl.int64) * (key * dim) + places[:, None] * dim + tl.arange(0, dim)[None, :]
    tl.store(dk_ptr + at, (dk * factor).to(dk_ptr.dtype.element_ty), mask=here[:, None])
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=here[:, None])
