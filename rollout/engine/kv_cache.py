"""The books of the paged KV cache: which blocks are free, shared, or hold a prefix that may be used again.

No tensor is touched here. The prefix cache is a trie whose roots are (weight epoch, (salt, adapter)): keys and values
that older weights or another adapter computed are never found. A node's children are looked up by the exact tokens of
the next block, so that no hash can collide. A block that no sequence holds stays findable until its memory is needed
(least recently freed first).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rollout.engine.request import CacheKey, PromptKey, Sequence

Node = int | tuple[int, CacheKey]
"""A number, or the root (weight epoch, (salt, adapter))."""
Edge = tuple[Node, tuple[int, ...]]
"""A node of the trie and the tokens of the block that follows it."""


@dataclass(frozen=True)
class CachedBlock:
    """A node of the trie and the block that holds its tokens' keys and values."""

    node: int
    block: int


class KVCache:
    """Blocks 1 … num_blocks - 1 of `block_size` tokens; block 0 is padding and never handed out."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"a KV cache needs at least 2 blocks (one is padding), got {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._children: dict[Edge, CachedBlock] = {}
        self._edge_of: dict[int, Edge] = {}
        self._last_node = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # -- blocks

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for one holder. The caller has checked `num_free`."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            if (edge := self._edge_of.pop(block, None)) is not None:
                self._children.pop(edge, None)
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more holder for each of `blocks`."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def free(self, sequence: Sequence) -> None:
        """Give up all that the sequence holds: it has computed nothing now."""
        for block in reversed(sequence.block_table):  # the end of a prefix is reused before its beginning
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
        sequence.block_table = []
        sequence.num_computed = sequence.num_registered = 0
        sequence.prefix_node = sequence.kv_epoch = None

    # -- prefixes

    def match(self, sequence: Sequence, epoch: int) -> tuple[list[CachedBlock], Edge | None]:
        """The longest cached prefix of the sequence, in whole blocks; at least one token is left to compute.

        Also what it would look up next: None where no full block follows.
        """
        found: list[CachedBlock] = []
        if not self.enable_prefix_caching or sequence.request.needs_every_prompt_row:
            return found, None
        node: Node = (epoch, sequence.request.cache_key)
        for index in range((len(sequence.token_ids) - 1) // self.block_size):
            edge = (node, self._tokens(sequence, index))
            cached = self._children.get(edge)
            if cached is None:
                return found, edge
            found.append(cached)
            node = cached.node
        return found, None

    def coming_edge(self, sequence: Sequence, epoch: int) -> Edge | None:
        """The edge that the sequence, which is being computed, enters next; None where it enters none."""
        index = sequence.num_registered
        if not self.enable_prefix_caching or sequence.kv_epoch != epoch:
            return None
        if (index + 1) * self.block_size > len(sequence.token_ids):
            return None
        return sequence.prefix_node or (epoch, sequence.request.cache_key), self._tokens(sequence, index)

    def prompt_key(self, sequence: Sequence) -> PromptKey | None:
        """Equal for sequences that may sample from one row of logits; None where this one computes its own."""
        sampled = len(sequence.token_ids) + sequence.in_flight > sequence.prompt_len
        if not self.enable_prefix_caching or sequence.request.needs_every_prompt_row or sampled:
            return None
        return sequence.request.prompt_key

    def register(self, sequence: Sequence, epoch: int) -> None:
        """Enter the sequence's full computed blocks of known tokens, if this epoch's weights computed all of them."""
        if not self.enable_prefix_caching or sequence.kv_epoch != epoch:
            return
        node: Node = sequence.prefix_node or (epoch, sequence.request.cache_key)
        known = min(sequence.num_computed, len(sequence.token_ids))
        for index in range(sequence.num_registered, known // self.block_size):
            edge = (node, self._tokens(sequence, index))
            cached = self._children.get(edge)
            if cached is None:
                self._last_node += 1
                cached = CachedBlock(self._last_node, sequence.block_table[index])
                self._children[edge] = cached
                self._edge_of[cached.block] = edge
            node = cached.node
            sequence.num_registered = index + 1
        sequence.prefix_node = node

    def reset_prefixes(self) -> None:
        """Forget every prefix; blocks in use stay with their sequences."""
        self._children.clear()
        self._edge_of.clear()

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        return tuple(sequence.token_ids[index * self.block_size : (index + 1) * self.block_size])
