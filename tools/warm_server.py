"""The server behind warm.py: imports third-party modules, then forks for each job.

    python tools/warm_server.py SOCKET MODULES

MODULES names what to import, one a line in the order of import; what cannot be imported
is left out: a job then imports it itself. Ends, with its jobs, when stdin closes.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import io
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path

from warm import STATUS, receive_job, send_job

# A job loads these from its own tree, or they are no modules of a wheel.
OWN = {"loadplan", "sglang", "tokenspeed", "tokenspeed_kernel", "vllm"}
# Libraries that start threads as they are imported, unless told not to.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
# The interpreters that a fork stands for; multiprocessing's tracker stays a small one.
_STARTS = ("from multiprocessing.forkserver ", "from multiprocessing.spawn ")


def preload(names: list[str]) -> None:
    """Import what can be imported, quietly, and leave no trace but the modules."""
    before = dict(os.environ)
    os.environ.update(_ONE_THREAD)
    with warnings.catch_warnings(), open(os.devnull, "w") as nothing:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(nothing), contextlib.redirect_stdout(nothing):
            for name in names:
                if name.partition(".")[0] in OWN or name in sys.modules:
                    continue
                with contextlib.suppress(Exception, SystemExit):
                    importlib.import_module(name)
    os.environ.clear()
    os.environ.update(before)


def check_before_fork() -> None:
    """Raises RuntimeError where a fork would not start as a process of its own."""
    loaded = OWN.intersection(name.partition(".")[0] for name in sys.modules)
    if loaded:
        raise RuntimeError(f"warm server: {sorted(loaded)} loaded before the fork")
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"warm server: {len(threads)} threads, expected one")


def serve(path: str) -> None:
    """Fork for each job that comes to the socket, until stdin closes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    for file in (sys.stdin, listener, woken):
        selector.register(file, selectors.EVENT_READ)
    jobs: dict[int, socket.socket] = {}
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for pid in jobs:
                    os.killpg(pid, signal.SIGKILL)
                return
            if key.fileobj is woken:
                woken.recv(4096)
                _finish(jobs, selector)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                job, files = receive_job(connection)
                check_before_fork()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for end in (listener, woken, wake, connection, *jobs.values()):
                        end.close()
                    selector.close()
                    _be(job, files)
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.setpgid(pid, pid)
                for file in files:
                    os.close(file)
                jobs[pid] = connection
                selector.register(connection, selectors.EVENT_READ, pid)
            elif key.data in jobs:  # the client is gone
                selector.unregister(key.fileobj)
                os.killpg(key.data, signal.SIGKILL)


def _finish(jobs: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Say how each ended job ended, and end what it left behind."""
    while jobs:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        # Not reaped yet, so that its number cannot be another one's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(ended.si_pid, signal.SIGKILL)
        _, status, used = os.wait4(ended.si_pid, 0)
        connection = jobs.pop(ended.si_pid)
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(connection)
        with contextlib.suppress(OSError):
            code = os.waitstatus_to_exitcode(status)
            connection.sendall(STATUS.pack(code, used.ru_utime + used.ru_stime))
        connection.close()


def _be(job: dict, files: list[int]) -> None:
    """Become the process that the job asks for; does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        # The server's own are closed or have lines of it in them.
        sys.stdin = open(0, closefd=False)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False),
            errors="backslashreplace",
            write_through=True,
        )
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = (
            sys.stdin,
            sys.stdout,
            sys.stderr,
        )
        # Tests start ranks, two or a fork server at a time.
        is_pytest = job["arguments"][:2] == ["-m", "pytest"]
        _feed_multiprocessing(4 if is_pytest else 0)
        _enter(job)
        code = _run(job["arguments"])
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # The rest of an interpreter's end takes long and does nothing that is seen.
        os._exit(code)


def _run(arguments: list[str]) -> int:
    """Do what ``python ARGUMENTS`` does; the exit code."""
    what, *rest = arguments
    try:
        if what == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif what == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            sys.path.insert(0, str(Path(what).resolve().parent))
            sys.argv = arguments
            runpy.run_path(what, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return (exit_.code or 0) & 0xFF
        print(exit_.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _feed_multiprocessing(count: int) -> None:
    """Let the interpreters that multiprocessing starts begin as forks too.

    A job has loaded an engine and may have threads when it wants a fork server or a
    spawned process, so ``count`` forks wait from the start. Each gets the command line,
    the environment and the open files of the interpreter that it stands for. When none
    is left, an interpreter is started as ever.
    """
    waiting: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _stand_by(theirs)
        theirs.close()
        waiting.append((pid, ours))
    spawn = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(path, arguments, passed):
        code, *rest = arguments[arguments.index("-c") + 1 :]
        if not (waiting and code.startswith(_STARTS)):
            return spawn(path, arguments, passed)
        order = {"code": code, "rest": rest, "numbers": sorted(map(int, passed))}
        order |= {"env": dict(os.environ), "cwd": os.getcwd()}
        pid, connection = waiting.pop()
        with connection:
            send_job(connection, order, [1, 2, *order["numbers"]])
        return pid

    multiprocessing.util.spawnv_passfds = spawnv_passfds


def _stand_by(connection: socket.socket) -> None:
    """Wait to become an interpreter of multiprocessing; does not return."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not connection.recv(1, socket.MSG_PEEK):
            os._exit(0)  # never wanted
        signal.signal(signal.SIGINT, signal.default_int_handler)
        order, files = receive_job(connection)
        connection.close()
        # The command line names the open files by their numbers in the job.
        numbers = [1, 2, *order["numbers"]]
        free = max(*numbers, *files) + 1
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD, free) for file in files]
        for number, file in zip(numbers, moved, strict=True):
            os.dup2(file, number)
        for file in {*moved, *files}.difference(numbers):
            os.close(file)
        _enter(order)
        sys.argv = ["-c", *order["rest"]]
        sys.path.insert(0, "")
        exec(order["code"], sys.modules["__main__"].__dict__)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _enter(job: dict) -> None:
    """Take over the environment, the folder and the path of modules of a job."""
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    importlib.invalidate_caches()
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder]
    # Not the server's own: a process of multiprocessing would import that again.
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__builtins__ = builtins


def main() -> None:
    path, names = sys.argv[1:]
    # Of this interpreter's own folders a job keeps the library's.
    sys.path.pop(0)
    preload(Path(names).read_text().split())
    gc.collect()
    gc.freeze()  # pages stay shared with the forks
    serve(path)


if __name__ == "__main__":
    main()
