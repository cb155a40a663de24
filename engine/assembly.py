"""Puts an engine together around an executor: its images, its guides, and how memory is divided.

This file knows which part needs which; it refuses to know what they do, and who sends requests.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.engine.core import Engine
from loraplex.engine.executor import Executor
from loraplex.engine.guidance import Guides
from loraplex.engine.image_fetcher import ImageFetcher
from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.engine.memory_share import divide
from loraplex.engine.residency import Residency
from loraplex.engine.settings import EngineSettings

HOST_SHARE = 4  # of what images can ever take, a part of this may be on its way in host memory


@contextmanager
def engine_on(
    executor: Executor,
    settings: EngineSettings,
    manifest: BaseManifest,
    store: ImageStore,
    cache: Path,
    wake: Callable[[], None],
) -> Iterator[Engine]:
    """An engine whose threads live as long as the block; `cache` is for images that are fetched.

    `wake` is called, on any thread, when there may be something to do. Raises `SettingsError` when
    the settings cannot fit the base.
    """
    boundary = divide(executor, settings, manifest)
    fetcher = ImageFetcher(
        store,
        cache,
        manifest.fingerprint,
        limit_bytes=boundary.most_image_bytes,
        prepare=executor.prepare_image,
        measure=executor.image_bytes,
    )
    residency = Residency(
        fetcher,
        budget_bytes=boundary.image_bytes,
        load=executor.add_image,
        unload=executor.remove_image,
        wake=wake,
        ttl_s=settings.image_ttl_s,
        tenant_minimum=settings.tenant_images,
        host_bytes=boundary.most_image_bytes // HOST_SHARE,
    )
    tokenizer = Path(manifest.path) / "tokenizer.json"
    guides = Guides(tokenizer, manifest.vocab_size, manifest.eos_token_ids)
    try:
        yield Engine(executor, residency, guides, settings, manifest, wake)
    finally:
        guides.close()
        residency.close()
