"""Block attention against a dense oracle written here as plainly as possible: one big mask, one softmax."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from dflash_lightning.device import Abilities
from dflash_lightning.ops import chunked_attention as chunked
from dflash_lightning.ops import flex_block_attention as flex_module
from dflash_lightning.ops.block_attention import block_attention
from dflash_lightning.ops.context import KVSource
from dflash_lightning.ops.flex_block_attention import flex_block_attention, make_mask_mod, visible_spans

# float64 goes the portable way, float32 on the CPU the fused one.
EXACT = {torch.float64: 1e-12, torch.float32: 2e-5}
CASES = [(False, None), (True, None), (False, 4), (True, 4), (False, 1), (True, 100)]


def dense_mask(sources, num_blocks, block_size, causal, window):
    """[B, N*K, columns] by loops over every pair."""
    batch = sources[0].start.shape[0] if sources else 1
    lengths = [s.k.shape[1] for s in sources]
    mask = torch.zeros(batch, num_blocks * block_size, sum(lengths) + num_blocks * block_size, dtype=torch.bool)
    for b in range(batch):
        for n in range(num_blocks):
            for i in range(block_size):
                row, first = n * block_size + i, 0
                for source, length in zip(sources, lengths, strict=True):
                    start, end, at = (int(x[b, n]) for x in (source.start, source.end, source.slot_row))
                    for j in range(length):
                        mask[b, row, first + j] = start <= j < end and (window is None or at + i - j < window)
                    first += length
                for j in range(block_size):
                    hidden = (causal and j > i) or (window is not None and abs(i - j) >= window)
                    mask[b, row, first + n * block_size + j] = not hidden
    return mask


def dense_attention(q, k_own, v_own, sources, *, causal, window, scale):
    b, n, k, hq, d = q.shape
    widen = lambda x: x.repeat_interleave(hq // x.shape[2], dim=2)  # noqa: E731
    keys = torch.cat([*[widen(s.k) for s in sources], widen(k_own.flatten(1, 2))], dim=1)
    values = torch.cat([*[widen(s.v) for s in sources], widen(v_own.flatten(1, 2))], dim=1)
    scores = torch.einsum("bqhd,bchd->bhqc", q.flatten(1, 2), keys) * scale
    mask = dense_mask(sources, n, k, causal, window)
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return torch.einsum("bhqc,bchd->bqhd", scores.softmax(-1), values).view(b, n, k, hq, d)


def make_case(*, dtype=torch.float64, num_blocks=5, seed=0, source_heads=(2,)):
    """Two rows of 20 positions: overlapping blocks, two packed documents in row 0, two padding blocks in row 1."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype).requires_grad_()  # noqa: E731
    anchors = torch.tensor([[2, 3, 5, 13, 16], [1, 7, 8, 0, 0]])[:, :num_blocks]
    start = torch.tensor([[0, 0, 0, 10, 10], [0, 0, 0, 0, 0]])[:, :num_blocks]
    end = torch.tensor([[2, 3, 5, 13, 16], [1, 7, 8, 0, 0]])[:, :num_blocks]
    sources = [KVSource(rand(2, 20, h, 4), rand(2, 20, h, 4), start, end, anchors) for h in source_heads]
    return rand(2, num_blocks, 3, 4, 4), rand(2, num_blocks, 3, 2, 4), rand(2, num_blocks, 3, 2, 4), sources


def leaves(q, k_own, v_own, sources):
    return [q, k_own, v_own, *[x for s in sources for x in (s.k, s.v)]]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("chunk_slots", [1, 6, 64])
@pytest.mark.parametrize(("causal", "window"), CASES)
@pytest.mark.parametrize("source_heads", [(), (2,), (2, 4)])
def test_output_and_gradients_equal_the_dense_oracle(monkeypatch, causal, window, chunk_slots, source_heads, dtype):
    monkeypatch.setattr(chunked, "CHUNK_SLOTS", chunk_slots)
    exact = EXACT[dtype]
    q, k_own, v_own, sources = make_case(source_heads=source_heads, dtype=dtype)
    if not sources:
        q, k_own, v_own = (x.detach()[:1].requires_grad_() for x in (q, k_own, v_own))
    args = dict(causal=causal, window=window, scale=0.37)
    out = block_attention(q, k_own, v_own, sources, **args)
    expected = dense_attention(q, k_own, v_own, sources, **args)
    torch.testing.assert_close(out, expected, rtol=0, atol=exact)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    inputs = leaves(q, k_own, v_own, sources)
    got, want = (torch.autograd.grad((y * weight).sum(), inputs) for y in (out, expected))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=exact)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("causal", "window"), CASES)
def test_a_source_that_all_blocks_share_stands_beside_one_with_intervals_of_their_own(causal, window, first, dtype):
    """Intervals [B, 1] are those of every block; the layers of a step make masks of them once."""
    masks, sizes = {}, []
    for seed in range(2):
        q, k_own, v_own, (own, other) = make_case(dtype=dtype, seed=seed, source_heads=(2, 2))
        if seed == 0:
            one = [x[:, :1].clone() for x in (other.start, other.end + 3, other.slot_row)]
            intervals = [(own.start, own.end, own.slot_row), one]
        mixed = [KVSource(s.k, s.v, *i, masks) for s, i in zip((own, other), intervals, strict=True)]
        wide = [KVSource(s.k, s.v, *(x.expand(-1, 5) for x in i)) for s, i in zip((own, other), intervals, strict=True)]
        order = (lambda x: x) if first == 0 else (lambda x: x[::-1])
        out = block_attention(q, k_own, v_own, order(mixed), causal=causal, window=window, scale=0.5)
        expected = dense_attention(q, k_own, v_own, order(wide), causal=causal, window=window, scale=0.5)
        torch.testing.assert_close(out, expected, rtol=0, atol=EXACT[dtype])
        sizes.append(len(masks))
    assert sizes[0] == sizes[1], "masks were made anew for the second layer"


def test_intervals_of_another_number_of_blocks_are_refused():
    q, k_own, v_own, (own, other) = make_case(source_heads=(2, 2))
    short = KVSource(other.k, other.v, *(x[:, :3] for x in (other.start, other.end, other.slot_row)))
    with pytest.raises(ValueError, match=r"of 3 blocks, but the layout has 5. Give them as \[B, 5\], or as \[B, 1\]"):
        block_attention(q, k_own, v_own, [own, short], causal=False, window=None, scale=0.5)


@pytest.mark.parametrize(("causal", "window"), CASES)
def test_a_device_that_must_not_be_read_from_sees_the_same(monkeypatch, causal, window):
    """Chunks are then given the whole context, since which rows they need is on the device: none is read."""
    monkeypatch.setattr(chunked, "abilities", lambda device: Abilities(queues=True))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("a value was read"))
    monkeypatch.setattr(chunked, "CHUNK_SLOTS", 6)
    q, k_own, v_own, sources = make_case(source_heads=(2, 4))
    args = dict(causal=causal, window=window, scale=0.37)
    inputs = leaves(q, k_own, v_own, sources)
    outputs = [f(q, k_own, v_own, sources, **args) for f in (block_attention, dense_attention)]
    weight = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    got, want = ([out, *torch.autograd.grad((out * weight).sum(), inputs)] for out in outputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_chunks_are_planned_once_per_step_and_window(monkeypatch):
    """Layers hand in the same intervals with keys of their own; another window or batch needs another plan."""
    planned, plan = [], chunked.plan_chunks
    monkeypatch.setattr(chunked, "plan_chunks", lambda *given: planned.append(given[2]) or plan(*given))
    _, _, _, (first,) = make_case()

    def step(start, windows):
        masks = {}
        for seed, window in enumerate(windows):
            q, k_own, v_own, sources = make_case(seed=seed)
            source = KVSource(sources[0].k, sources[0].v, start, first.end, first.slot_row, masks)
            args = dict(causal=False, window=window, scale=0.5)
            out = block_attention(q, k_own, v_own, [source], **args)
            expected = dense_attention(q, k_own, v_own, [source], **args)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)

    step(first.start, [None, 4, None, 4])
    step(first.end - first.end.clamp(max=1), [None, None])
    assert planned == [None, 4, None]


@pytest.mark.parametrize(("causal", "window"), CASES)
def test_one_block_per_row_equals_the_dense_oracle(causal, window):
    q, k_own, v_own, sources = make_case(num_blocks=1)
    args = dict(causal=causal, window=window, scale=0.5)
    out = block_attention(q, k_own, v_own, sources, **args)
    torch.testing.assert_close(out, dense_attention(q, k_own, v_own, sources, **args), rtol=0, atol=1e-12)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("causal", "window"), CASES)
def test_flex_attention_sees_what_the_portable_path_sees(causal, window):
    """Flex has no CPU backward, so values only; the mask function is the one that CUDA uses."""
    q, k_own, v_own, sources = make_case(dtype=torch.float32, source_heads=(2, 2))
    args = dict(causal=causal, window=window, scale=0.5)
    q, k_own, v_own, *kv = (x.detach() for x in leaves(q, k_own, v_own, sources))
    with torch.no_grad():
        flex = flex_block_attention(q, k_own, v_own, kv[::2], kv[1::2], sources, **args)
        torch.testing.assert_close(flex, block_attention(q, k_own, v_own, sources, **args), rtol=0, atol=2e-6)


@pytest.mark.compiled
@pytest.mark.parametrize(("causal", "window"), CASES)
@pytest.mark.parametrize("source_heads", [(), (2,), (2, 4)])
def test_the_mask_function_of_flex_is_the_dense_mask(causal, window, source_heads):
    q, _, _, sources = make_case(source_heads=source_heads)
    q = q if sources else q[:1]
    spans = visible_spans(sources, q, causal=causal, window=window)
    slots, columns = 15, 15 + 20 * len(sources)
    mask = create_mask(make_mask_mod(spans), len(q), None, slots, columns, device="cpu")
    assert torch.equal(mask[:, 0], dense_mask(sources, 5, 3, causal, window))


def many_tiles(window):
    """40 blocks of 8 slots on rows of 300 positions: 3 tiles of 128 slots, 5 of columns. Row 0 packs two documents."""
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    anchors = torch.randint(0, 300, (2, 40), generator=g).sort().values
    start = torch.where((anchors >= 140) & (torch.arange(2) == 0)[:, None], 140, 0)
    source = KVSource(rand(2, 300, 2, 8), rand(2, 300, 2, 8), start, anchors, anchors)
    q, k_own, v_own = rand(2, 40, 8, 4, 8), rand(2, 40, 8, 2, 8), rand(2, 40, 8, 2, 8)
    slot, column = torch.arange(320)[:, None], torch.arange(620)
    own, place = column - 300, slot % 8
    at = lambda x: x.repeat_interleave(8, dim=1)[..., None]  # noqa: E731  # [2, 320, 1]
    context = (column < 300) & (column >= at(start)) & (column < at(anchors))
    mine = (own >= 0) & (own // 8 == slot // 8)
    if window is not None:
        context, mine = context & (at(anchors) + place - column < window), mine & ((own % 8 - place).abs() < window)
    return q, k_own, v_own, source, context | mine, (own >= 0) & (own % 8 > place)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 40), (True, 40)])
def test_tiles_that_flex_skips_are_those_that_nobody_sees(causal, window):
    """And those that it does not mask are those that everybody sees; values are those of one dense softmax."""
    q, k_own, v_own, source, seen, later = many_tiles(window)
    seen = seen & ~later if causal else seen
    padded = torch.nn.functional.pad(seen, (0, 20, 0, 64)).unflatten(2, (5, 128)).unflatten(1, (3, 128))
    counts = padded.sum((2, 4))  # [2, 3, 5]
    with torch.no_grad():
        mask = flex_module.make_mask([source], q, causal=causal, window=window)
        assert torch.equal(mask.to_dense()[:, 0].bool(), counts > 0) and bool((counts == 0).any())
        whole = torch.zeros_like(counts, dtype=torch.bool)
        for b in range(2):
            for row in range(3):
                count = int(mask.full_kv_num_blocks[b, 0, row])
                whole[b, row, mask.full_kv_indices[b, 0, row, :count].long()] = True
        assert torch.equal(whole, counts == 128 * 128)
        args = dict(causal=causal, window=window, scale=0.35)
        flex = flex_block_attention(q, k_own, v_own, [source.k], [source.v], [source], **args)
        columns = [torch.cat([x, y.flatten(1, 2)], 1) for x, y in ((source.k, k_own), (source.v, v_own))]
        k, v = (x.repeat_interleave(2, dim=2).transpose(1, 2) for x in columns)
        scores = (q.flatten(1, 2).transpose(1, 2) @ k.transpose(-1, -2) * 0.35).masked_fill(~seen[:, None], -torch.inf)
        dense = (scores.softmax(-1) @ v).transpose(1, 2).reshape(q.shape)
        torch.testing.assert_close(flex, dense, rtol=0, atol=5e-6)
        torch.testing.assert_close(block_attention(q, k_own, v_own, [source], **args), dense, rtol=0, atol=5e-6)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_mask_is_made_once_per_step_and_pattern(monkeypatch):
    """Layers hand in the same intervals with keys of their own; another pattern or batch needs another mask."""
    made = []
    create = flex_module.create_block_mask
    monkeypatch.setattr(flex_module, "create_block_mask", lambda *a, **kw: made.append(a) or create(*a, **kw))
    _, _, _, (first,) = make_case(dtype=torch.float32)

    def step(start, patterns):
        masks = {}
        for seed, (causal, window) in enumerate(patterns):
            q, k_own, v_own, sources = make_case(dtype=torch.float32, seed=seed)
            q, k_own, v_own, k, v = (x.detach() for x in leaves(q, k_own, v_own, sources))
            source = KVSource(k, v, start, first.end, first.slot_row, masks)
            args = dict(causal=causal, window=window, scale=0.5)
            out = flex_block_attention(q, k_own, v_own, [source.k], [source.v], [source], **args)
            expected = block_attention(q, k_own, v_own, [source], **args)
            torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)

    with torch.no_grad():
        step(first.start, [(False, None), (True, 4), (False, None), (True, 4)])
        assert len(made) == 2
        step(first.end - first.end.clamp(max=1), [(False, None), (False, None)])
        assert len(made) == 3


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_new_shapes_and_patterns_are_compiled_a_fixed_number_of_times():
    """What CUDA compiles, without a code generator: after the second shape nothing is compiled again."""
    counters = {name: CompileCounterWithBackend("eager") for name in ("mask", "attention")}
    torch._dynamo.reset()
    create = torch.compile(create_block_mask, backend=counters["mask"])
    attend = torch.compile(flex_attention, backend=counters["attention"])
    counts = []
    patterns = [(False, None), (True, None), (False, 4), (True, 4), (False, None)]
    for (causal, window), (length, num_blocks) in zip(
        patterns, [(256, 32), (384, 64), (512, 64), (640, 96), (128, 160)], strict=True
    ):
        anchors = torch.arange(num_blocks)[None] * 3 % (length - 1) + 1
        anchors = anchors.sort().values
        q, k, v = (torch.randn(1, num_blocks, 4, 2, 16) for _ in range(3))
        source = KVSource(*(torch.randn(1, length, 2, 16) for _ in range(2)), anchors * 0, anchors, anchors)
        spans = visible_spans([source], q, causal=causal, window=window)
        with torch.no_grad():
            mask = create(make_mask_mod(spans), 1, None, num_blocks * 4, length + num_blocks * 4, device="cpu")
            k, v = (torch.cat([x, y.flatten(1, 2)], 1).transpose(1, 2) for x, y in ((source.k, k), (source.v, v)))
            attend(q.flatten(1, 2).transpose(1, 2), k, v, block_mask=mask, scale=0.25)
        counts.append([counter.frame_count for counter in counters.values()])
    assert counts[1:] == [[2, 2]] * 4, counts


@pytest.mark.parametrize(("causal", "window"), CASES)
def test_one_training_block_per_row_learns_what_the_dense_oracle_learns(causal, window):
    """A document with one anchor takes decoding's path, with gradients."""
    q, k_own, v_own, sources = make_case(num_blocks=1, source_heads=(2, 4))
    args = dict(causal=causal, window=window, scale=0.37)
    inputs = leaves(q, k_own, v_own, sources)
    outputs = [f(q, k_own, v_own, sources, **args) for f in (block_attention, dense_attention)]
    weight = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    got, want = (torch.autograd.grad((out * weight).sum(), inputs) for out in outputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def visible_counts(anchors, length, block_size, causal, window):
    """How many columns each slot gives weight to, measured on the attention: all scores equal, values one-hot."""
    columns = length + len(anchors) * block_size
    ends = torch.tensor([anchors])
    eye = torch.eye(columns)
    source = KVSource(torch.zeros(1, length, 1, columns), eye[None, :length, None], ends * 0, ends, ends)
    own = eye[length:].view(1, len(anchors), block_size, 1, columns)
    zeros = torch.zeros(1, len(anchors), block_size, 1, columns)
    out = block_attention(zeros, zeros, own, [source], causal=causal, window=window, scale=1.0)
    return (out[0, :, :, 0] > 0).sum(-1).flatten().tolist()


def test_visible_counts_of_the_method_sheet():
    """S = 8, anchors 2 and 5, K = 3."""
    assert visible_counts([2, 5], 8, 3, False, None) == [5, 5, 5, 8, 8, 8]
    assert visible_counts([2, 5], 8, 3, True, None) == [3, 4, 5, 6, 7, 8]
    # Slot 0 and 2 of a block are 2 apart, so a window of 4 narrows only the context.
    assert visible_counts([2, 5], 8, 3, False, 4) == [5, 5, 4, 6, 5, 4]


def test_overlapping_blocks_do_not_leak():
    """L = 10, B = 4, anchors 3 and 5; 64 visible cells; feature 3 reaches block 1 only."""
    assert visible_counts([3, 5], 10, 4, False, None) == [7] * 4 + [9] * 4
    g = torch.Generator().manual_seed(0)
    q, k_own, v_own = (torch.randn(1, 2, 4, 2, 8, generator=g) for _ in range(3))
    keys, values = (torch.randn(1, 10, 2, 8, generator=g) for _ in range(2))
    ends = torch.tensor([[3, 5]])
    run = lambda k, v: block_attention(  # noqa: E731
        q, k_own, v_own, [KVSource(k, v, ends * 0, ends, ends)], causal=False, window=None, scale=0.3
    )
    before = run(keys, values)
    keys[:, 3], values[:, 3] = 7.0, -7.0
    after = run(keys, values)
    assert torch.equal(before[:, 0], after[:, 0])
    assert not torch.equal(before[:, 1], after[:, 1])


def test_rows_that_no_slot_sees_get_exactly_zero_gradient():
    q, k_own, v_own, sources = make_case()
    out = block_attention(q, k_own, v_own, sources, causal=False, window=None, scale=0.5)
    out[0, 0].sum().backward()  # block 0 of row 0 sees rows 0 and 1
    for x in (sources[0].k, sources[0].v):
        assert torch.count_nonzero(x.grad[0, 2:]) == 0 and torch.count_nonzero(x.grad[1]) == 0
        assert torch.count_nonzero(x.grad[0, :2]) > 0
    assert torch.count_nonzero(k_own.grad[0, 1:]) == 0


def test_packed_blocks_equal_each_block_alone():
    q, k_own, v_own, sources = make_case()
    args = dict(causal=False, window=None, scale=0.5)
    together = block_attention(q, k_own, v_own, sources, **args)
    s = sources[0]
    for b in range(2):
        for n in range(5):
            first, end = int(s.start[b, n]), int(s.end[b, n])
            rows = slice(first, end)
            zero = torch.zeros(1, 1, dtype=torch.long)
            alone = KVSource(s.k[b : b + 1, rows], s.v[b : b + 1, rows], zero, zero + end - first, zero + end - first)
            block = tuple(x[b : b + 1, n : n + 1] for x in (q, k_own, v_own))
            torch.testing.assert_close(
                block_attention(*block, [alone], **args)[0, 0], together[b, n], rtol=0, atol=1e-14
            )


@pytest.mark.parametrize("source_heads", [(2,), (2, 4)])
def test_bf16_is_close_to_fp32_and_keeps_its_dtype(source_heads):
    q, k_own, v_own, sources = make_case(dtype=torch.float32, source_heads=source_heads)
    low = lambda x: x.detach().bfloat16().requires_grad_()  # noqa: E731
    small = [KVSource(low(s.k), low(s.v), s.start, s.end, s.slot_row) for s in sources]
    args = dict(causal=True, window=None, scale=0.5)
    cases, weight = [((low(q), low(k_own), low(v_own)), small), ((q, k_own, v_own), sources)], torch.randn(q.shape)
    found = []
    for own, rows in cases:
        out = block_attention(*own, rows, **args)
        inputs = leaves(*own, rows)
        found.append([out, *torch.autograd.grad((out * weight.to(out.dtype)).sum(), inputs)])
    for narrow, wide in zip(*found, strict=True):
        assert narrow.dtype == torch.bfloat16
        assert (narrow.float() - wide).norm() < 0.02 * wide.norm()


def test_no_score_or_mask_over_all_slots_and_rows_exists(monkeypatch):
    """The largest tensor made in forward or backward stays near the inputs' size although N*K * (S + N*K) is 40x it."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                seen.append(out.untyped_storage().nbytes())
            return out

    g = torch.Generator().manual_seed(0)
    anchors = torch.arange(1, 257)[None] * 2
    q, k_own, v_own = (torch.randn(1, 256, 8, 1, 4, generator=g, requires_grad=True) for _ in range(3))
    source = KVSource(*(torch.randn(1, 520, 1, 4, generator=g) for _ in range(2)), anchors * 0, anchors, anchors)
    with Watch():
        block_attention(q, k_own, v_own, [source], causal=False, window=None, scale=0.5).sum().backward()
    dense = 4 * 256 * 8 * (520 + 256 * 8)
    assert max(seen) < dense / 60


@pytest.mark.compiled
def test_decoding_attention_compiles_to_one_graph_for_every_length():
    def step(q, k_own, v_own, keys, values, end):
        source = KVSource(keys, values, torch.zeros_like(end), end, end)
        return block_attention(q, k_own, v_own, [source], causal=False, window=6, scale=0.5)

    g = torch.Generator().manual_seed(0)
    q, k_own, v_own = (torch.randn(2, 1, 4, h, 8, generator=g) for h in (4, 2, 2))
    keys, values = (torch.randn(2, 32, 2, 8, generator=g) for _ in range(2))
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for end in ([0, 5], [7, 32], [1, 1]):
            ends = torch.tensor(end)[:, None]
            expected = step(q, k_own, v_own, keys, values, ends)
            torch.testing.assert_close(compiled(q, k_own, v_own, keys, values, ends), expected, rtol=0, atol=1e-6)
