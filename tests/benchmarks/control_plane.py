"""What the control plane costs the first worker: `python tests/benchmarks/control_plane.py [WORKERS...]`.

The first worker's control plane is real; the other workers are connections of one other process, which say what workers
say. For each number of workers: the share of a core that the heartbeats take on the first worker, and the microseconds
a connection and second; then the seconds from a report until the last worker has the verdict, and the verdict's bytes.
"""

from __future__ import annotations

import multiprocessing
import pickle
import selectors
import socket
import sys
import time
from typing import Any

from aiodist._core.call import OrderCheck
from aiodist._core.report import Location, ReplicaState
from aiodist.workers.addresses import Listening
from aiodist.workers.joining import Hello
from aiodist.workers.layout import Layout
from aiodist.workers.peer import LENGTH, Peer
from aiodist.workers.state import ReplicaPart, WorkerState
from aiodist.workers.tcp_control import BEAT_SECONDS, TcpControl

WORKERS = (64, 512, 1024)
SECONDS = 3.0
KEY = (1, 1)


def state(rank: int) -> WorkerState:
    """Return what a worker tells whose replica waits; the last one's has ended."""
    stack = tuple(Location("/a/program/of/some/length/train.py", line, "step") for line in (100, 200, 300))
    end = ReplicaState.FAILED if rank == 0 else None
    return WorkerState(rank, (ReplicaPart(6, end, None, 0, stack),))


def others(workers: int, port: int, token: bytes, told: Any) -> None:
    """Be all workers but the first: beat, answer, and tell when the last verdict has come, and its size."""
    selector = selectors.DefaultSelector()
    peers = []
    for rank in range(1, workers):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(token + LENGTH.pack(rank))
        peers.append(Peer(rank, connection))
        selector.register(connection, selectors.EVENT_READ, peers[-1])
    verdicts, size, next_beat = 0, 0, time.monotonic()
    while verdicts < workers - 1:
        if time.monotonic() >= next_beat:
            next_beat += BEAT_SECONDS
            for peer in peers:
                peer.send("beat")
                peer.flush()
        for key, _ in selector.select(0.01):
            for name, *arguments in key.data.messages():
                if name == "ask":
                    key.data.send("state", KEY, pickle.dumps(state(key.data.rank)))
                    key.data.flush()
                elif name == "verdict":
                    verdicts, size = verdicts + 1, len(arguments[1])
    told.send((time.monotonic(), size))
    for peer in peers:
        peer.send("farewell", "has ended")
        peer.flush()
    told.recv()


def measure(workers: int) -> tuple[float, float, int]:
    """Return the share of a core, the seconds to the verdict, and its bytes."""
    listening = Listening()
    ours, theirs = multiprocessing.Pipe()
    address = listening.address
    process = multiprocessing.get_context("fork").Process(
        target=others, args=(workers, address.port, address.token, theirs), daemon=True
    )
    process.start()
    layout = Layout(0, [("CPU:0",)] * workers)
    hellos = [Hello(("CPU:0",), "host", 0, None) for _ in range(workers)]
    control = TcpControl(layout, OrderCheck.CALL_SITE, hellos, listening, [])
    clock = time.pthread_getcpuclockid(control._thread.ident or 0)
    time.sleep(0.5)
    begun = time.clock_gettime(clock)
    time.sleep(SECONDS)
    share = (time.clock_gettime(clock) - begun) / SECONDS
    begun = time.monotonic()
    control.report(KEY, state(0))
    ended, size = ours.recv()
    control.close()
    ours.send(None)
    process.join()
    return share, ended - begun, size


def main() -> None:
    """Print the table."""
    print(f"{'workers':>10}{'of a core':>12}{'µs/beat':>10}{'verdict s':>12}{'bytes':>10}")
    for workers in map(int, sys.argv[1:] or WORKERS):
        share, seconds, size = measure(workers)
        beat = share / (workers - 1) * BEAT_SECONDS * 1e6
        print(f"{workers:10}{share:12.1%}{beat:10.1f}{seconds:12.3f}{size:10}", flush=True)


if __name__ == "__main__":
    main()
