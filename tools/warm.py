"""Run Python processes as forks of one that has imported the third-party modules.

Importing an engine takes 10 s, nine of them for torch, transformers and the like. A
server imports those once; each job is a fork of it, which then does what ``python
ARGUMENTS`` would do: ``-m MODULE``, ``-c CODE`` or ``SCRIPT``, in its own folder, with
its own environment and its own PYTHONPATH. Engines and loadplan are never loaded in the
server, so that a job imports those of its own tree, and the server has one thread.

    with warm.server():                    # ends with the block
        warm.run(["-m", "pytest", "test"], cwd=..., env=...)

Without a server ``run`` starts one that ends with this process. ``LOADPLAN_WARM=off``
in the environment makes every job a fresh process: the answers must be the same.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTING = "LOADPLAN_WARM"
STATUS = struct.Struct("<id")  # a job's exit code and its seconds of processor time
_OWNED = contextlib.ExitStack()


def modules_file() -> Path:
    """The names of the modules to import once, for these pins; made where missing."""
    pins = hashlib.sha256((ROOT / "requirements.txt").read_bytes()).hexdigest()
    path = ROOT / "build" / "warm" / f"modules-{pins[:16]}.txt"
    if not path.exists():
        script = Path(__file__).with_name("warm_names.py")
        environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
        command = [sys.executable, str(script), str(path)]
        subprocess.run(command, env=environment, check=True)
    return path


@contextlib.contextmanager
def server() -> Iterator[None]:
    """A server for the jobs of this process and of those that it starts."""
    if os.environ.get(SETTING) == "off":
        yield
        return
    with tempfile.TemporaryDirectory(prefix="warm") as folder:
        path = str(Path(folder, "socket"))
        script = Path(__file__).with_name("warm_server.py")
        command = [sys.executable, str(script), path, str(modules_file())]
        # What the interpreter was told is for the jobs, not for the server.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        before = os.environ.get(SETTING)
        try:
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{script.name}: did not start, see above")
            os.environ[SETTING] = path
            yield
        finally:
            os.environ.pop(SETTING, None)
            if before is not None:
                os.environ[SETTING] = before
            # The server ends its jobs and itself when this pipe closes.
            process.stdin.close()
            process.wait()
            process.stdout.close()


def run(
    arguments: Sequence[str | Path],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """What ``python ARGUMENTS`` printed and returned, from a fork of the server.

    As by subprocess.run, with text captured; ``fresh`` does without the server. The
    result of a fork has ``seconds`` too, its processor time without that of other jobs.
    Raises subprocess.TimeoutExpired after ``timeout`` seconds; the job is then killed.
    """
    words = [str(argument) for argument in arguments]
    environment = dict(os.environ if env is None else env)
    setting = os.environ.get(SETTING)
    if fresh or setting == "off":
        return subprocess.run(
            [sys.executable, *words],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if setting is None:
        _OWNED.enter_context(server())
        atexit.register(_OWNED.close)
        setting = os.environ[SETTING]
    environment[SETTING] = setting
    job = {"arguments": words, "cwd": str(cwd or os.getcwd()), "env": environment}
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        open(os.devnull, "rb") as nothing,
        socket.socket(socket.AF_UNIX) as connection,
    ):
        connection.connect(setting)
        files = [file.fileno() for file in (nothing, out, err)]
        send_job(connection, job, files)
        connection.settimeout(timeout)
        try:
            status = connection.recv(STATUS.size, socket.MSG_WAITALL)
        except TimeoutError:
            raise subprocess.TimeoutExpired(words, timeout) from None
        if len(status) != STATUS.size:
            raise RuntimeError(f"{words}: the server ended before the job")
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    code, seconds = STATUS.unpack(status)
    result = subprocess.CompletedProcess(words, code, *texts)
    result.seconds = seconds
    return result


def send_job(connection: socket.socket, job: dict, files: list[int]) -> None:
    """Send a job with the descriptors that become files of it."""
    payload = json.dumps(job).encode()
    socket.send_fds(connection, [struct.pack("<I", len(payload))], files)
    connection.sendall(payload)


def receive_job(connection: socket.socket) -> tuple[dict, list[int]]:
    """Receive what ``send_job`` sent; the descriptors belong to the caller."""
    head, files, _, _ = socket.recv_fds(connection, 4, 16)
    (length,) = struct.unpack("<I", head)
    payload = connection.recv(length, socket.MSG_WAITALL)
    return json.loads(payload), files
