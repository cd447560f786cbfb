"""The window cache against plain lists of its tokens, under any sequence of the operations that transformers uses."""
import copy

import torch
from hypothesis import settings, stateful, strategies as st

import wush_kv as W
from test_wush_kv import integer_T, integers
from wush_kv import Codec, Encoding, kernels
from wush_tools import transformers_cache as operations
from wush_tools.testing import distance, seeds, softmax_attention

WINDOWS = W.Windows(sink=3, keep=17, flush=5)
CODEC = Codec(3)
SCHEME = W.Scheme(Encoding(CODEC, integer_T(5)), Encoding(CODEC))
T_INVERSE = torch.linalg.inv(SCHEME.keys.transform.double())


class Token:
    """One token of one row: k and v (g, d), what is stored of them once it is packed, and what is read."""

    def __init__(self, k, v):
        self.k = k
        self.v = v
        self.k_stored = None
        self.v_stored = None
        self.k_read = k
        self.v_read = v

    @property
    def is_packed(self):
        return self.k_stored is not None

    def pack(self):
        self.k_stored = W.transform_and_quantize(self.k[None, :, None], SCHEME.keys)
        self.v_stored = W.transform_and_quantize(self.v[None, :, None], SCHEME.values)
        k = W.apply(T_INVERSE, W.dequantize(*self.k_stored))
        self.k_read = k[0, :, 0]
        self.v_read = W.dequantize(*self.v_stored)[0, :, 0]


class Operations(stateful.RuleBasedStateMachine):
    """Integers and an integer T make sums exact in any order, so that bytes can be compared."""

    def empty(self, batch):
        return W.WindowCache(batch, 2, 16, SCHEME, WINDOWS)

    @stateful.initialize(batch=st.integers(1, 3))
    def begin(self, batch):
        self.cache = self.empty(batch)
        self.rows = [[] for _ in range(batch)]               # of tokens

    @stateful.rule(t=st.integers(1, 40), seed=seeds, padding=st.integers(0, 50))
    def append(self, t, seed, padding):
        batch = len(self.rows)
        k, v, q = integers(seed, 9, 3, batch, 2, t, 16).float() - 4
        q = q[:, :, None] / 4
        pad = [max(0, padding - 20 * i) % (t + 1) for i in range(batch)]
        o = self.cache.attend(q, k, v, pad)
        for i, row in enumerate(self.rows):
            start = len(row)
            row += [Token(k[i, :, j], v[i, :, j]) for j in range(pad[i], t)]
            if pad[i] < t:
                K = torch.stack([token.k_read for token in row], 1)
                V = torch.stack([token.v_read for token in row], 1)
                expected = softmax_attention(q[i, :, :, pad[i]:], K, V, start)
                assert distance(o[i, :, :, pad[i]:], expected) < 1e-3
            self.flush(row)

    def flush(self, row):
        """Pack what is due, as the rule says, token by token."""
        packed = sum(token.is_packed for token in row)
        recent = len(row) - WINDOWS.sink - packed
        due = (recent - WINDOWS.keep) // WINDOWS.flush * WINDOWS.flush
        first = WINDOWS.sink + packed
        for token in row[first:first + max(due, 0)]:
            token.pack()

    @stateful.rule(count=st.integers(0, 60))
    def crop(self, count):
        operations.crop(self.cache, count)
        self.rows = [row[:max(len(row) - count, 0)] for row in self.rows]

    @stateful.rule(dice=st.randoms(use_true_random=False), size=st.integers(1, 3))
    def select(self, dice, size):
        """A larger size repeats rows, as beams do."""
        rows = [dice.randrange(len(self.rows)) for _ in range(size)]
        operations.select(self.cache, rows)
        rows = [self.rows[i] for i in rows]
        self.rows = [list(map(copy.copy, row)) for row in rows]     # rows that were one go on apart

    @stateful.rule()
    def save_and_restore(self):
        saved = operations.state(self.cache)
        x = torch.ones(len(self.rows), 2, 30, 16)
        self.cache.attend(x[:, :, None], x, x)               # what happens later is not in the state
        self.cache = self.empty(len(self.rows))
        operations.restore(self.cache, saved)

    @stateful.precondition(lambda self: sum(len(row) for row in self.rows) > 150)
    @stateful.rule()
    def empty_by_cropping(self):
        operations.crop(self.cache, max(self.cache.n_tokens))
        self.rows = [[] for _ in self.rows]

    @stateful.invariant()
    def counts_are_equal(self):
        assert self.cache.n_tokens == [len(row) for row in self.rows]
        packed = [sum(token.is_packed for token in row) for row in self.rows]
        assert self.cache.n_packed == packed

    @stateful.invariant()
    def windows_and_bytes_are_equal(self):
        for i, row in enumerate(self.rows):
            exact = [token for token in row if not token.is_packed]
            packed = [token for token in row if token.is_packed]
            self.compare(self.cache.keys, i, [t.k for t in exact], [t.k_stored for t in packed])
            self.compare(self.cache.values, i, [t.v for t in exact], [t.v_stored for t in packed])

    def compare(self, store, i, exact, stored):
        counts = self.cache.counts(i)
        sink = store.sink[i, :, :counts.sink]
        in_windows = torch.cat([sink, store.recent[i, :, :counts.recent]], 1)
        if exact:
            assert torch.equal(in_windows, torch.stack(exact, 1))
        if stored:
            codes, scale, offset = (torch.cat(parts, 2)[0] for parts in zip(*stored))
            assert torch.equal(store.codes[i, :, :counts.packed], kernels.pack(codes, CODEC.bits))
            pairs = kernels.join_pair(scale, offset)
            assert torch.equal(store.pairs[i, :, :counts.packed], pairs)

    @stateful.invariant()
    def reading_is_equal(self):
        longest = max(self.cache.n_tokens)
        K = self.cache.read(self.cache.keys, longest)
        V = self.cache.read(self.cache.values, longest)
        for i, row in enumerate(self.rows):
            packed = [j for j, token in enumerate(row) if token.is_packed]
            if packed:
                column = torch.tensor(packed) + longest - len(row)
                k = torch.stack([row[j].k_read for j in packed], 1)
                v = torch.stack([row[j].v_read for j in packed], 1)
                assert distance(K[i, :, column], k) < 1e-3
                assert distance(V[i, :, column], v) < 1e-3


TestOperations = Operations.TestCase
TestOperations.settings = settings(
    max_examples=12, stateful_step_count=18, deadline=None, derandomize=True, database=None)
