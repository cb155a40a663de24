"""What an fp32 image means, computed from its bytes by the format's own words.

Knows the image format; refuses to know how images are made.
"""

from pathlib import Path

import numpy as np

from loraplex.engine.images import PROJECTIONS, ImageHeader, read_image


class Image:
    """The dense meaning of an fp32 image, read from its block by the format's own words."""

    def __init__(self, path: Path, digest: str) -> None:
        self.header: ImageHeader
        self.header, self.block = read_image(path, digest)
        self.entries = {(e.layer, e.projection): e for e in self.header.entries}

    def array(self, offset: int, *shape: int, dtype: str = "<f4") -> np.ndarray:
        assert offset % 128 == 0
        count = int(np.prod(shape))
        return np.frombuffer(self.block, dtype, count, offset).reshape(shape)

    def apply(self, layer: int, name: str, x: np.ndarray, weight: np.ndarray) -> np.ndarray | None:
        projection, names = next((p, n) for p, n in PROJECTIONS.items() if name in n)
        entry = self.entries.get((layer, projection))
        if entry is None or entry.slices[names.index(name)].rank == 0:
            return None
        at = names.index(name)
        ranks = [s.rank for s in entry.slices]
        rows = slice(sum(ranks[:at]), sum(ranks[: at + 1]))
        a = self.array(entry.a, sum(ranks), entry.in_features)[rows]
        scale = self.array(entry.scale, sum(ranks))[rows]
        part = entry.slices[at]
        delta = (scale * (x @ a.T)) @ self.array(part.b, part.rank, part.out_features)
        gain = self.array(part.gain, part.out_features) if part.gain >= 0 else np.float32(1)
        bias = self.array(part.bias, part.out_features) if part.bias >= 0 else np.float32(0)
        return gain * (x @ weight.T + delta) + bias
