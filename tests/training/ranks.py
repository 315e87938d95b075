"""Runs a function in several processes that have imported everything already; none of them can hang.

For scripts: call ``in_ranks`` before any tensor is made, because the processes are forks.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

HOST = "127.0.0.1"


def in_ranks(world: int, work: Callable[[int], None], *, seconds: float) -> None:
    """Call ``work(rank)`` in ``world`` processes, as Lightning would start them.

    Raises:
        RuntimeError: a process failed or was not done after ``seconds``. All of them have ended by then.
    """
    port, ranks = _free_port(), {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _be(rank, world, port, work)
        ranks[pid] = rank
    end, failed = time.monotonic() + seconds, ""
    while ranks and not failed:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = ranks.pop(pid)
            failed = "" if status == 0 else f"rank {rank} of {world} failed ({status})"
        elif time.monotonic() > end:
            failed = f"ranks {sorted(ranks.values())} of {world} were not done after {seconds} s"
        else:
            time.sleep(0.02)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if failed:
        raise RuntimeError(failed)


def _be(rank: int, world: int, port: int, work: Callable[[int], None]) -> None:
    """The life of one process."""
    names = {"MASTER_ADDR": HOST, "MASTER_PORT": port, "NODE_RANK": 0, "LOCAL_RANK": rank, "RANK": rank}
    os.environ.update({name: str(value) for name, value in names.items()} | {"WORLD_SIZE": str(world)})
    status = 1
    try:
        work(rank)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])
