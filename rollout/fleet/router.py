"""Which engine takes a request: the one with the least work left, unless another has its prefix in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# Prompts are known by their prefixes of whole chunks of so many tokens, and as wholes.
CHUNK = 64
# A rank that has the prefix is overloaded when it has this many such requests' work more than the least busy one:
# a usual group of single requests stays together, and a system prompt that all share does not bind them all.
STICKINESS = 8
_REMEMBERED = 1 << 16


class Router:
    """Remembers which ranks were given which prefixes; the engines' own caches are the truth.

    A prefix is a hash of its tokens: a collision costs a detour. `forget` what a commit has made worthless.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, set[int]] = {}

    def choose(
        self,
        prompt_token_ids: list[int],
        salt: str | None,
        own: int,
        work: Mapping[int, int],
        session: str | None = None,
    ) -> int:
        """The rank for a request of so much work of its `own`, given what `work` each living rank has left.

        Where its `session` went last counts more than any prefix: there are all its turns.
        """
        rank = least = min(work, key=work.__getitem__)
        keys = list(_prefixes(prompt_token_ids, salt))
        if session is not None:
            keys.append(hash(("session", session)))
        for key in reversed(keys):
            if holders := self._ranks.get(key, set()) & work.keys():
                holder = min(holders, key=work.__getitem__)
                if work[holder] - work[least] <= STICKINESS * own:
                    rank = holder
                break
        for key in keys:
            ranks = self._ranks.pop(key, set())  # what is used last is forgotten last
            ranks.add(rank)
            self._ranks[key] = ranks
        if session is not None:
            self._ranks[keys[-1]] = {rank}  # its last turn alone
        while len(self._ranks) > _REMEMBERED:
            del self._ranks[next(iter(self._ranks))]
        return rank

    def forget(self, rank: int | None = None) -> None:
        """Forget all prefixes, or those of a rank that has died."""
        if rank is None:
            self._ranks.clear()
        for ranks in self._ranks.values():
            ranks.discard(rank)


def _prefixes(token_ids: list[int], salt: str | None) -> Iterator[int]:
    key = hash(salt)
    for start in range(0, len(token_ids), CHUNK):
        key = hash((key, *token_ids[start : start + CHUNK]))
        yield key
