"""Looks at this machine and this installation: what is there, what is wrong, how to mend it.

Knows where each part would be found. It changes nothing, starts nothing that stays, and refuses
to import the model libraries: their versions are read from their metadata.
"""

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec

from loraplex.engine.client.local import LocalEngine
from loraplex.platform import boot
from loraplex.platform import doctor_services as services
from loraplex.platform.engine_process import backend_command, choice_command
from loraplex.platform.findings import Finding
from loraplex.platform.settings import Settings
from loraplex.platform.sockets import socket_path

GIB = 1 << 30
LOW_DISK, LOW_MEMORY = 2 * GIB, 1 * GIB
ANSWER_S = 3.0
CHOICE_S = 60.0  # torch is imported where there is a GPU
CPU_FEATURES = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "bf16",
)


async def examine(settings: Settings) -> list[Finding]:
    """Return all findings, in the order in which a start would meet them."""
    served = boot.is_served(settings)
    return [
        *(look() for look in (_python, _torch, _processor, _gpu, _memory)),
        services.configuration(settings),
        _data_dir(settings),
        _disk(settings),
        await services.database(settings),
        *await services.redis(settings, served),
        await services.store(settings),
        _model(settings),
        _executor(settings),
        _port(settings, served),
        await _engine(settings, served),
    ]


def _python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    return Finding("Python", "ok", f"{found}, Loraplex {metadata.version('loraplex')}")


def _torch() -> Finding:
    try:
        return Finding("torch", "ok", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        mend = "pip install -c constraints.txt torch, or run `make serve`, which installs it."
        return Finding("torch", "wrong", "not installed", mend)


def _processor() -> Finding:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    flags = {*facts.get("flags", facts.get("Features", "")).split()}
    features = " ".join(name for name in CPU_FEATURES if name in flags)
    name = facts.get("model name", platform.machine())
    return Finding(
        "processor", "ok", f"{name}, {os.cpu_count()} cores, {features or 'no SIMD known'}"
    )


def _gpu() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("GPU", "ok", "none found; the engine runs on the processor")
    lines = _output(program, "--query-gpu=name,memory.total", "--format=csv,noheader")
    return Finding("GPU", "ok", "; ".join(lines) or "none that nvidia-smi can see")


def _memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return Finding("memory", "ok", "not known on this system")
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
    total, free = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])
    found = f"{free / GIB:.1f} GiB available of {total / GIB:.1f}"
    if free < LOW_MEMORY:
        return Finding("memory", "warning", found, "End other programs, or choose a smaller model.")
    return Finding("memory", "ok", found)


def _data_dir(settings: Settings) -> Finding:
    folder = settings.data_dir.expanduser().absolute()
    if not folder.exists():
        parent = next(path for path in folder.parents if path.exists())
        if os.access(parent, os.W_OK):
            return Finding("data directory", "ok", f"{folder}, made at the first start")
    elif os.access(folder, os.W_OK | os.X_OK):
        return Finding("data directory", "ok", str(folder))
    mend = "Mend its owner and mode, or choose another with LORAPLEX_DATA_DIR."
    return Finding("data directory", "wrong", f"{folder} cannot be written", mend)


def _disk(settings: Settings) -> Finding:
    folder = settings.data_dir.expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / GIB:.1f} GiB free"
    if free < LOW_DISK:
        return Finding("disk", "warning", found, "Free some space: models and images need it.")
    return Finding("disk", "ok", found)


def _model(settings: Settings) -> Finding:
    mend = "Give --model a Hugging Face id, a directory or a .gguf; `make serve` fetches a demo."
    if settings.model:
        path = Path(settings.model).expanduser()
        looks_local = settings.model.startswith((".", "/", "~")) or path.suffix == ".gguf"
        if looks_local and not path.exists():
            return Finding("model", "wrong", f"{settings.model} does not exist", mend)
        return Finding("model", "ok", settings.model)
    try:
        base = boot.read_base(boot.base_dir(settings))
    except (OSError, msgspec.DecodeError):
        return Finding("model", "warning", "none chosen and none prepared", mend)
    if not Path(base.path).is_dir():
        return Finding("model", "wrong", f"{base.path} is gone", mend)
    return Finding("model", "ok", f"{base.name}, {base.fingerprint[:12]}, in {base.path}")


def _executor(settings: Settings) -> Finding:
    """Ask the engine's own code, in a process of its own, what it would compute with and why."""
    base_file = boot.base_dir(settings) / boot.BASE_NAME
    prepared = base_file.is_file()
    command = choice_command(base_file, settings.engine) if prepared else backend_command()
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHOICE_S, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing was said"]
        return Finding("executor", "wrong", said[-1], "Mend the setting that it names.")
    found = done.stdout.strip()
    if found.startswith(("torch", "reference")):
        mend = "Install g++ if it is missing; `docs/settings.md` says what else may be set."
        return Finding("executor", "warning", found, mend)
    return Finding("executor", "ok", found)


def _port(settings: Settings, served: bool) -> Finding:
    try:
        with boot.listen(settings.host, settings.port):
            return Finding("port", "ok", f"{settings.host}:{settings.port} is free")
    except boot.StartError as error:
        if served:
            return Finding("port", "ok", f"{settings.host}:{settings.port} is served")
        return Finding("port", "wrong", f"{settings.host}:{settings.port} is taken", str(error))


async def _engine(settings: Settings, served: bool) -> Finding:
    """Ask the running engine who it is; one that is not running is no fault."""
    if not served:
        return Finding("engine", "ok", "not running; it starts with `loraplex serve`")
    client = LocalEngine(f"ipc://{socket_path(settings.run_dir, boot.ENGINE_SOCKET)}")
    await client.start()
    try:
        ready = await client.wait_ready(ANSWER_S)
    except TimeoutError:
        mend = "Wait, if it is starting; its last words are in the output of `loraplex serve`."
        return Finding("engine", "warning", "does not answer", mend)
    finally:
        await client.close()
    found = f"{ready.executor} executor on {ready.device} in {ready.dtype}"
    return Finding("engine", "ok", f"{found}, KV cache of {ready.kv_capacity_tokens} tokens")


def _output(*command: str) -> list[str]:
    """Return the lines that a program prints, none if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()
