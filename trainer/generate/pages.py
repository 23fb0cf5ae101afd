"""The pages of the cache: which request uses which page, and which pages hold a prefix that prompts can share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from native.decode.paged import PAGE

Key = tuple[int, tuple[int, ...]]


class Pages:
    """Allocates pages. A full page is found by its tokens and the page before it, so that prompts can share it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._users = [0] * count
        # A page's key contains the serial number of the page before it; serial numbers are never reused.
        self._serials = 0
        self._known: dict[Key, tuple[int, int]] = {}
        self._keys: dict[int, tuple[Key, int]] = {}
        # Registered pages without a user, in the order of eviction.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Return how many pages have no user; some of them still hold shareable prefixes."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """Return a page for one user; the caller makes sure that a page is free."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a user to a page."""
        self._users[page] += 1
        self._idle.pop(page, None)

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove one user from each page. The last page of a text is evicted first."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        return self._users[page] > 1

    def find(self, ids: Sequence[int]) -> list[int]:
        """Return the registered pages that hold a prefix of `ids`, and add a user to each.

        The last id is never part of the prefix, because its logits must be computed.
        """
        found, before = list[int](), 0
        for end in range(PAGE, len(ids), PAGE):
            entry = self._known.get((before, tuple(ids[end - PAGE : end])))
            if entry is None:
                break
            page, before = entry
            self.share(page)
            found.append(page)
        return found

    def remember(self, pages: Sequence[int], ids: Sequence[int], done: int) -> int:
        """Register a text's full pages from page `done` on, for `find`; return how many are registered.

        ids: the tokens whose keys and values are in the pages.
        """
        full = len(ids) // PAGE
        while done < full:
            before = self._keys[pages[done - 1]][1] if done and pages[done - 1] in self._keys else 0
            if done and not before:
                # Another page with the same tokens is registered instead.
                break
            key = (before, tuple(ids[done * PAGE : (done + 1) * PAGE]))
            if key in self._known:
                break
            self._serials += 1
            self._known[key] = (pages[done], self._serials)
            self._keys[pages[done]] = (key, self._serials)
            done += 1
        return done

    def _forget(self, page: int) -> None:
        key, _ = self._keys.pop(page)
        del self._known[key]
