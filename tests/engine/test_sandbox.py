"""The compiler's confinement: what it cannot do, shown by a process that tries."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ENTER = """
import sys
from pathlib import Path
from loraplex.engine import sandbox
held = sandbox.enter(Path(sys.argv[1]), Path(sys.argv[1]), 1000, {seconds})
"""


def confined(folder: Path, program: str, seconds: int = 60) -> subprocess.CompletedProcess[str]:
    """Run `program` in `folder`, once the sandbox is entered; `held` are the layers that hold."""
    return subprocess.run(
        [sys.executable, "-P", "-c", ENTER.format(seconds=seconds) + program, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_reaches_no_network_where_the_kernel_allows(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = confined(
            tmp_path,
            f"""
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), 5)
    print("no_network" in held, "connected")
except OSError:
    print("no_network" in held, "refused")
""",
        )
    assert done.stdout.strip() in ("True refused", "False connected"), done.stderr


def test_it_cannot_fill_the_disk(tmp_path: Path) -> None:
    done = confined(
        tmp_path,
        """
import errno
try:
    with open("large", "wb", buffering=0) as file:
        while file.write(bytes(8 << 20)) == 8 << 20:
            pass
        file.write(b"x")
except OSError as error:
    print(errno.errorcode[error.errno])
""",
    )
    assert done.stdout.strip() == "EFBIG", done.stderr
    assert (tmp_path / "large").stat().st_size == (64 << 20) + 2000


def test_it_writes_in_one_folder_alone_and_starts_nothing_where_the_kernel_allows(
    tmp_path: Path,
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.write_text("as it was")
    done = confined(
        inside,
        f"""
import os, shutil, subprocess
def attempt(act):
    try:
        act()
        return "done"
    except OSError:
        return "refused"
if "no_writes_elsewhere" not in held:
    sys.exit("not here")
shutil.copy("/bin/true", "program")
print(*map(attempt, (
    lambda: open({str(outside)!r}, "w"),
    lambda: os.truncate({str(outside)!r}, 0),
    lambda: os.unlink({str(outside)!r}),
    lambda: os.rename("program", {str(outside)!r}),
    lambda: os.symlink("x", {str(tmp_path / "link")!r}),
    lambda: os.mkdir({str(tmp_path / "folder")!r}),
    lambda: os.execv("/bin/true", ["true"]),
)))
""",
    )
    assert done.stdout.split() == ["refused"] * 7 or done.stderr.strip() == "not here", done.stderr
    assert outside.read_text() == "as it was"
    assert {path.name for path in tmp_path.iterdir()} == {"inside", "outside"}


def test_it_cannot_open_files_without_end_or_raise_a_limit_again(tmp_path: Path) -> None:
    done = confined(
        tmp_path,
        """
import errno, resource
files = []
try:
    while True:
        files.append(open("/dev/null"))
except OSError as error:
    print(errno.errorcode[error.errno], len(files) < sandbox.OPEN_FILES)
for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
    soft, hard = resource.getrlimit(kind)
    print(soft == hard != resource.RLIM_INFINITY)
""",
    )
    assert done.stdout.split() == ["EMFILE", "True", *["True"] * 4], done.stderr


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(50)"])
def test_it_cannot_outlive_its_time(program: str, tmp_path: Path) -> None:
    done = confined(tmp_path, program, seconds=1)
    assert -done.returncode in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)


def test_it_gains_no_privilege_and_shows_nobody_its_memory(tmp_path: Path) -> None:
    done = confined(
        tmp_path,
        """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("no_new_privs" in held, status["NoNewPrivs"].strip() == "1")
import ctypes
print("not_dumpable" in held, ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0)
""",
    )
    assert done.stdout.split() == ["True"] * 4, done.stderr


def test_it_ends_when_what_started_it_is_killed(tmp_path: Path) -> None:
    """Its end of a pipe is closed, and there is nobody else who could close it."""
    reader, writer = os.pipe()
    tell = f"import os, time; os.write({writer}, b'x'); time.sleep(60)"
    command = [sys.executable, "-P", "-c", ENTER.format(seconds=60) + tell, str(tmp_path)]
    start = f"import subprocess; subprocess.run({command!r}, pass_fds=[{writer}])"
    parent = subprocess.Popen([sys.executable, "-c", start], pass_fds=[writer])
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read(1) == b"x"
        parent.kill()
        assert pipe.read() == b""
    parent.wait()


def test_an_upload_cannot_make_it_import_something(tmp_path: Path) -> None:
    """Files beside the checkpoint that are called like modules are never run."""
    for name in ("numpy", "msgspec", "json", "argparse", "loraplex", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\n")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    command = [sys.executable, "-P", "-m", "loraplex.engine.compile_adapter", "."]
    done = subprocess.run(
        [*command, "--base", "none.json", "--out", "image"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    assert (done.returncode, "could not be compiled" in done.stderr) == (2, True)
    late = """
sys.path[:0] = ["", sys.argv[1]]
sandbox.enter(Path(sys.argv[1]), Path(sys.argv[1]), 0, 60)
import numpy
print(numpy.__file__)
"""
    done = confined(tmp_path, late)
    assert done.stdout.strip().endswith("numpy/__init__.py"), done.stderr
    assert not (tmp_path / "ran").exists()


def test_what_a_kernel_does_not_allow_is_left_out(tmp_path: Path) -> None:
    """A limit that cannot be set is not claimed."""
    done = confined(
        tmp_path,
        """
import resource
refuse = lambda *_: (_ for _ in ()).throw(ValueError("not allowed"))
resource.setrlimit = refuse
again = sandbox.enter(Path(sys.argv[1]), Path(sys.argv[1]), 0, 60)
print(sorted(set(held) - set(again)))
""",
    )
    named = ["core", "cpu", "file_size", "memory", "open_files", "processes"]
    assert done.stdout.strip() == str(named), done.stderr
