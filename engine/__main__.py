"""`python -m loraplex.engine`: one engine process, from its command line to its end.

It reads the base's manifest, loads the weights, and serves at the endpoint until SIGTERM, SIGINT
or the end of the process that started it. Progress and errors are lines on stderr; what its caller
did wrong ends it with code 2 and one sentence.
"""

import argparse
import gc
import logging
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import zmq

from loraplex.engine import report
from loraplex.engine import settings as knobs
from loraplex.engine.assembly import engine_on
from loraplex.engine.core import Engine
from loraplex.engine.executor import Executor
from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.engine.load import load_executor
from loraplex.engine.log import configure
from loraplex.engine.model.config import ModelError
from loraplex.engine.parent import end_with_parent
from loraplex.engine.waker import Waker
from loraplex.engine.worker import Worker
from loraplex.kernels.dispatch import BackendError

READY_LINE = "ready"  # what a supervisor waits for, alone on its line

log = logging.getLogger("loraplex.engine")


def main(arguments: list[str] | None = None) -> int:
    """Run an engine process; returns its exit code."""
    end_with_parent()
    options = _parser().parse_args(arguments)
    configure()
    try:
        serve(options, knobs.from_arguments(options))
    except (knobs.SettingsError, ModelError, BackendError, OSError, zmq.ZMQError) as error:
        log.error("cannot start: %s", error)
        return 2
    except Exception:
        log.exception("stopped by a fault")
        return 1
    return 0


def serve(options: argparse.Namespace, settings: knobs.EngineSettings) -> None:
    """Load the base and serve until told to stop.

    Raises `SettingsError`, `ModelError`, `BackendError`, `OSError` or `zmq.ZMQError` when what was
    asked for cannot be done.
    """
    manifest, started = _read_manifest(options.base), time.monotonic()
    log.info("loading weights of %s", manifest.name)
    with ExitStack() as stack:
        waker = Waker()
        stack.callback(waker.close)
        executor = load_executor(manifest, settings)
        store, cache = ImageStore(options.images), options.cache
        engine = stack.enter_context(
            engine_on(executor, settings, manifest, store, cache, waker.set)
        )
        worker = Worker(engine, options.endpoint, waker)
        _report(executor, engine, settings, manifest)
        gc.collect()
        gc.freeze()  # a collection among all that torch brings would stop steps for 0.1 s
        log.info("loaded in %.1f s: %s", time.monotonic() - started, _summary(engine))
        _run(worker)


def _report(
    executor: Executor, engine: Engine, settings: knobs.EngineSettings, manifest: BaseManifest
) -> None:
    """Tell what fits into the engine's memory, and what could be set better."""
    ready = engine.describe(epoch="")
    capacity = report.Capacity(
        block_size=executor.block_size,
        block_bytes=executor.block_bytes,
        blocks=ready.kv_capacity_tokens // executor.block_size,
        memory_bytes=executor.memory_bytes,
        swap_slots=executor.swap_slots,
        model_len=ready.max_model_len,
        base_len=manifest.max_position_embeddings,
    )
    report.tell(report.describe_capacity(settings, capacity), report.advise(settings, capacity))


def _run(worker: Worker) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    print(READY_LINE, file=sys.stderr, flush=True)
    worker.run()
    log.info("stopped")


def _read_manifest(path: Path) -> BaseManifest:
    try:
        return msgspec.json.decode(path.read_bytes(), type=BaseManifest)
    except msgspec.DecodeError as error:
        raise knobs.SettingsError(f"{path} does not describe a prepared base: {error}") from error


def _summary(engine: Engine) -> str:
    ready = engine.describe(epoch="")
    return (
        f"{ready.executor} on {ready.device} in {ready.dtype}, {ready.kv_capacity_tokens} tokens"
        f" of KV cache, at most {ready.max_model_len} a sequence"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loraplex.engine", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="base.json of a prepared base")
    parser.add_argument("--endpoint", required=True, help="where to listen, such as ipc:///run/e")
    parser.add_argument("--images", required=True, help="URL or directory of the image store")
    parser.add_argument("--cache", type=Path, required=True, help="directory for fetched images")
    knobs.add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
