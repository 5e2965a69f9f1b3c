"""The cache's books against a model that knows who holds each block, what was written there, and what may be found."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.engine.kv_cache import KVCache
from rollout.engine.request import Request, Sequence
from rollout.sampling.params import SamplingParams

BLOCK = 2
NUM_BLOCKS = 9


def sequence(token_ids: list[int], salt: str | None = None, prompt_logprobs: int | None = None) -> Sequence:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    request = Request("r", token_ids, params, seed=0, arrival=0, max_tokens=1, cache_salt=salt)
    return Sequence(request, 0, list(token_ids))


def compute_all(cache: KVCache, seq: Sequence, epoch: int) -> None:
    """Allocate, compute and enter a sequence that shares nothing."""
    seq.block_table = cache.allocate(cache.blocks_for(len(seq.token_ids)))
    seq.num_computed, seq.kv_epoch = len(seq.token_ids), epoch
    cache.register(seq, epoch)


@dataclass(eq=False)
class Entry:
    """A full block that was entered after `parent`, another entry or a root."""

    parent: Entry | tuple[int, str | None]
    tokens: tuple[int, ...]


@dataclass(eq=False)
class Live:
    """A sequence that holds blocks, and the entries of its full blocks as far as they are entered."""

    seq: Sequence
    chain: list[Entry] = field(default_factory=list)


class KVCacheMachine(RuleBasedStateMachine):
    """Sequences over three token ids come, grow, fork and go in a cache of eight blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(NUM_BLOCKS, BLOCK)
        self.live: list[Live] = []
        self.epoch = 0
        self.free = list(range(1, NUM_BLOCKS))  # in the order in which they are to be used
        self.entries: dict[int, Entry] = {}
        self.memory: dict[int, object] = {}  # a block's content: the epoch, the salt and all tokens up to its end

    # -- the model

    def tokens(self, seq: Sequence, index: int) -> tuple[int, ...]:
        return tuple(seq.token_ids[index * BLOCK : (index + 1) * BLOCK])

    def content(self, seq: Sequence, index: int) -> object:
        return self.epoch, seq.request.cache_salt, tuple(seq.token_ids[: (index + 1) * BLOCK])

    def lookup(self, parent: Entry | tuple[int, str | None], tokens: tuple[int, ...]) -> int | None:
        found = [b for b, e in self.entries.items() if e.parent == parent and e.tokens == tokens]
        assert len(found) < 2
        return found[0] if found else None

    def expected(self, seq: Sequence) -> list[int]:
        parent: Entry | tuple[int, str | None] = (self.epoch, seq.request.cache_salt)
        blocks: list[int] = []
        while (len(blocks) + 1) * BLOCK < len(seq.token_ids):
            block = self.lookup(parent, self.tokens(seq, len(blocks)))
            if block is None:
                break
            blocks.append(block)
            parent = self.entries[block]
        return blocks

    def allocate(self, count: int) -> list[int]:
        blocks = self.cache.allocate(count)
        assert blocks == self.free[:count]
        del self.free[:count]
        for block in blocks:
            self.entries.pop(block, None)
            self.memory.pop(block, None)
        return blocks

    def held(self) -> list[int]:
        return [block for live in self.live for block in live.seq.block_table]

    def compute(self, live: Live, count: int) -> None:
        seq = live.seq
        seq.num_computed = min(seq.num_computed + count, len(seq.token_ids))
        self.cache.register(seq, self.epoch)
        for index in range(seq.num_computed // BLOCK):
            if seq.kv_epoch == self.epoch:
                self.memory[seq.block_table[index]] = self.content(seq, index)
                if index == len(live.chain):
                    parent = live.chain[-1] if live.chain else (self.epoch, seq.request.cache_salt)
                    block = self.lookup(parent, self.tokens(seq, index))
                    entry = Entry(parent, self.tokens(seq, index)) if block is None else self.entries[block]
                    if block is None:
                        self.entries[seq.block_table[index]] = entry
                    live.chain.append(entry)

    # -- what happens

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9), salt=st.sampled_from([None, "a"]))
    def come(self, tokens: list[int], salt: str | None) -> None:
        seq = sequence(tokens, salt)
        found, _ = self.cache.match(seq, self.epoch)
        blocks = [cached.block for cached in found]
        assert blocks == self.expected(seq)
        for index, block in enumerate(blocks):
            assert self.memory[block] == self.content(seq, index)
        self.cache.share(blocks)
        self.free = [block for block in self.free if block not in blocks]
        live = Live(seq, [self.entries[block] for block in blocks])
        self.live.append(live)
        seq.block_table, seq.num_computed, seq.kv_epoch = blocks, len(blocks) * BLOCK, self.epoch
        seq.num_registered, seq.prefix_node = len(blocks), found[-1].node if found else None
        needed = self.cache.blocks_for(len(tokens)) - len(found)
        if needed > self.cache.num_free:
            self.go(len(self.live) - 1)
        else:
            seq.block_table = blocks + self.allocate(needed)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), count=st.integers(1, 5))
    def compute_some(self, which: int, count: int) -> None:
        self.compute(self.live[which % len(self.live)], count)

    @precondition(lambda self: self.live and self.free)
    @rule(which=st.integers(0, 99), token=st.integers(0, 2))
    def sample(self, which: int, token: int) -> None:
        live = self.live[which % len(self.live)]
        self.compute(live, len(live.seq.token_ids))
        live.seq.token_ids.append(token)
        live.seq.block_table += self.allocate(
            self.cache.blocks_for(len(live.seq.token_ids)) - len(live.seq.block_table)
        )

    @precondition(lambda self: self.live and self.free)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        live = self.live[which % len(self.live)]
        seq = live.seq
        full = seq.num_computed // BLOCK
        copy = sequence(seq.token_ids[: full * BLOCK + 1], seq.request.cache_salt)
        self.cache.share(seq.block_table[:full])
        copy.block_table = seq.block_table[:full] + self.allocate(1)
        copy.num_computed, copy.kv_epoch = full * BLOCK, seq.kv_epoch
        copy.num_registered, copy.prefix_node = seq.num_registered, seq.prefix_node
        self.live.append(Live(copy, list(live.chain)))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def go(self, which: int) -> None:
        live = self.live.pop(which % len(self.live))
        given_up = [block for block in reversed(live.seq.block_table) if block not in self.held()]
        self.cache.free(live.seq)
        self.free += given_up
        assert (live.seq.block_table, live.seq.num_computed, live.seq.kv_epoch) == ([], 0, None)

    @rule()
    def commit(self) -> None:
        self.epoch += 1
        for live in self.live:
            live.seq.kv_epoch = None

    @rule()
    def reset_prefixes(self) -> None:
        self.cache.reset_prefixes()
        self.entries.clear()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), tail=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def waiting_for_what_is_coming_pays(self, which: int, tail: list[int]) -> None:
        live = self.live[which % len(self.live)]
        waiter = sequence(live.seq.token_ids + tail, live.seq.request.cache_salt)
        found, edge = self.cache.match(waiter, self.epoch)
        if edge is not None and edge == self.cache.coming_edge(live.seq, self.epoch):
            self.compute(live, len(live.seq.token_ids))
            assert len(self.cache.match(waiter, self.epoch)[0]) > len(found)

    # -- what always holds

    @invariant()
    def every_block_is_held_or_free(self) -> None:
        assert self.cache.num_free == len(self.free)
        assert {*self.free, *self.held()} == set(range(1, NUM_BLOCKS))
        assert not set(self.free) & set(self.held())

    def teardown(self) -> None:
        while self.live:
            self.go(0)
        assert self.cache.num_free == self.cache.num_usable == NUM_BLOCKS - 1


TestKVCache = KVCacheMachine.TestCase
TestKVCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_prefix_is_found_in_its_own_epoch_and_salt_only() -> None:
    cache = KVCache(NUM_BLOCKS, BLOCK)
    seq = sequence([1, 2, 3, 4, 5], "a")
    compute_all(cache, seq, epoch=3)
    again = sequence([1, 2, 3, 4, 9], "a")
    assert [cached.block for cached in cache.match(again, 3)[0]] == seq.block_table[:2]
    assert not cache.match(again, 4)[0]
    assert not cache.match(sequence([1, 2, 3, 4, 9]), 3)[0]
    assert not cache.match(sequence([1, 0, 3, 4, 9], "a"), 3)[0]


def test_one_token_is_always_left_to_compute() -> None:
    cache = KVCache(NUM_BLOCKS, BLOCK)
    compute_all(cache, sequence([1, 2, 3, 4]), epoch=0)
    assert len(cache.match(sequence([1, 2, 3, 4]), 0)[0]) == 1
    assert len(cache.match(sequence([1, 2, 3, 4, 5]), 0)[0]) == 2


def test_the_children_of_an_evicted_block_are_not_found_under_its_successor() -> None:
    cache = KVCache(NUM_BLOCKS, BLOCK)
    first, second = sequence([1, 2]), sequence([1, 2, 3, 4])
    first.block_table, second.block_table = cache.allocate(1), cache.allocate(2)
    (evicted,) = first.block_table
    for seq in (first, second):  # both were computed, and the first one's block stands for [1, 2]
        seq.num_computed, seq.kv_epoch = len(seq.token_ids), 0
        cache.register(seq, 0)
    cache.free(first)
    assert evicted in cache.allocate(cache.num_free)
    assert not cache.match(sequence([1, 2, 3, 4, 5]), 0)[0]
    for tokens in ([5, 6], [1, 2]):
        successor = sequence(tokens)
        successor.block_table, successor.num_computed, successor.kv_epoch = [evicted], 2, 0
        cache.register(successor, 0)
        assert [cached.block for cached in cache.match(sequence([*tokens, 3, 4, 5]), 0)[0]] == [evicted]


def test_prompt_logprobs_skip_no_prefix() -> None:
    cache = KVCache(NUM_BLOCKS, BLOCK)
    compute_all(cache, sequence([1, 2, 3]), epoch=0)
    asks = sequence([1, 2, 3, 4, 5], prompt_logprobs=0)
    assert cache.match(asks, 0) == ([], None)


def test_nothing_is_found_where_prefix_caching_is_off() -> None:
    cache = KVCache(NUM_BLOCKS, BLOCK, enable_prefix_caching=False)
    seq = sequence([1, 2, 3])
    compute_all(cache, seq, epoch=0)
    assert cache.match(sequence([1, 2, 3]), 0) == ([], None)
    assert cache.coming_edge(seq, 0) is None


def test_a_cache_of_padding_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 2 blocks .* got 1"):
        KVCache(1, BLOCK)
