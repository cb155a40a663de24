"""Which images are pinned: they stay on the device once they are there.

This file knows digests and bytes; it refuses to know where images are, and why they are pinned.
"""

MAX_PINS = 4096


class Pins:
    """Pinned digests, and the bytes of those that are resident: at most half of a budget."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # 0 while the image is not resident
        self.resident_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, digest: str) -> bool:
        return digest in self._sizes

    def add(self, digest: str, size: int, budget_bytes: int) -> bool:
        """Pin an image, of `size` bytes if it is resident, else 0; says whether there is room."""
        is_one_more = digest not in self._sizes
        total = self.resident_bytes - self._sizes.get(digest, 0) + size
        if total > budget_bytes // 2 or (is_one_more and len(self._sizes) >= MAX_PINS):
            return False
        self._sizes[digest], self.resident_bytes = size, total
        return True

    def remove(self, digest: str) -> None:
        """Unpin an image; one that is not pinned is no error."""
        self.resident_bytes -= self._sizes.pop(digest, 0)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when the bytes do not add up."""
        if self.resident_bytes != sum(self._sizes.values()):
            raise RuntimeError("pinned images do not add up")
