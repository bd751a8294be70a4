"""The processes of a synthetic server over several nodes: they meet over TCP, look at the weights on their own node, and end together.

    rank 0   listens at --dist-init-addr <--one connection each-- the other ranks         serves once all of them are there
             --a folder of new weights--> each: does it hold this model here? --'' or what is wrong-->
A connection that ends, ends the process at either side of it, as a collective does that has lost a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn, TextIO

from workers.model.architecture import Architecture, ModelError
from workers.model.compatibility import check_same_model

ANSWER_S, LOOK_S = 60.0, 0.05


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a server over several nodes, as SGLang's."""
    parser.add_argument("--nnodes", type=int, default=1, help="nodes that the server is spread over")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this one is")
    parser.add_argument("--dist-init-addr", default="", help="ADDRESS:PORT of the first, where all meet")


def _address(options: argparse.Namespace) -> tuple[str, int]:
    host, _, port = options.dist_init_addr.rpartition(":")
    return host, int(port)


class Others:
    """Rank 0's view of the other ranks, which are there once this is made."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._files: list[TextIO] = []
        self._said: list[SimpleQueue[str]] = []
        if options.nnodes > 1:
            with socket.create_server(_address(options), reuse_port=False) as listener:
                for _ in range(options.nnodes - 1):
                    self._add(listener.accept()[0])

    def _add(self, connection: socket.socket) -> None:
        file, said = connection.makefile("rw", encoding="utf-8"), SimpleQueue[str]()
        self._files.append(file)
        self._said.append(said)

        def read() -> None:
            for line in file:
                said.put(json.loads(line))
            _end("another rank of this server has ended")

        threading.Thread(target=read, name="rank", daemon=True).start()

    def check(self, folder: Path) -> None:
        """Have the other ranks look at `folder` on their nodes. Raises `ModelError` with what is wrong there."""
        for file in self._files:
            file.write(json.dumps(str(folder)) + "\n")
            file.flush()
        for number, said in enumerate(self._said, 1):
            try:
                problem = said.get(timeout=ANSWER_S)
            except Empty:
                problem = f"no answer in {ANSWER_S:g} s"
            if problem:
                raise ModelError(f"{folder}, on the node of rank {number}: {problem}")


def follow(options: argparse.Namespace, architecture: Architecture) -> NoReturn:
    """The life of any other rank. The process that started it, whose end is this one's, limits how long it looks for rank 0."""
    while True:
        try:
            connection = socket.create_connection(_address(options))
            break
        except ConnectionRefusedError:
            time.sleep(LOOK_S)
    with connection.makefile("rw", encoding="utf-8") as file:
        for line in file:
            try:
                check_same_model(Path(json.loads(line)), architecture)
                problem = ""
            except (ModelError, OSError) as error:
                problem = str(error)
            file.write(json.dumps(problem) + "\n")
            file.flush()
    _end("rank 0 of this server has ended")


def _end(why: str) -> NoReturn:
    print(why, file=sys.stderr, flush=True)
    os._exit(1)
