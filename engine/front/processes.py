"""Engine processes of a front: started as children, and restarted when they end.

A front is the process that serves several engines at one port.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from engine.part import ERROR_PREFIX

log = logging.getLogger(__name__)


class FrontError(Exception):
    """Engine that cannot be started; the message is one sentence for the user."""


class EngineProcess:
    """One engine process of several.

    It exits when its standard input closes, so it also ends if the front is killed.

    Attributes:
        name: its number and device, for messages.
        url: base URL of the running process.
        is_up: set while the process responds to requests.
    """

    def __init__(self, index: int, device: str, arguments: Sequence[str]) -> None:
        """Describe the process; `run` starts it.

        Args:
            index: number of the engine.
            device: its device, for messages; the engine picks the ``--device`` option in ``arguments`` whose index is
                ``index``.
            arguments: command-line arguments of the front, which apply to its engines.
        """
        self.name = f"Engine {index} on {device}"
        self.url = ""
        self.is_up = asyncio.Event()
        self._command = [sys.executable, "-m", "engine", *arguments, "--part", str(index)]
        self._process: Process | None = None
        self._is_stopping = False

    async def run(self) -> None:
        """Run the process until `stop` is called, and restart it whenever it ends before that.

        A restarted process restores the sessions from their journals.

        Raises:
            FrontError: the process ended before it was ready, at its first start or at a restart.
        """
        while not self._is_stopping:
            # In a session of its own, the process receives no Ctrl-C from the terminal: the front stops it.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
            if self._is_stopping:
                self._process.terminate()
            assert self._process.stdout is not None
            is_ready, reason = False, ""
            async for text in self._process.stdout:
                line = text.decode(errors="replace").strip()
                if line.startswith("http://") and not is_ready:
                    self.url, is_ready = line, True
                    if not self._is_stopping:
                        self.is_up.set()
                elif line.startswith(ERROR_PREFIX):
                    reason = line.removeprefix(ERROR_PREFIX)
                else:  # printed by a library
                    log.info("%s: %s", self.name, line)
            status = await self._process.wait()
            self.is_up.clear()
            if self._is_stopping:
                return
            if not is_ready:
                reason = reason or f"it ended with status {status}, see the log."
                raise FrontError(f"{self.name} did not start, so all engines stop: {reason}")
            log.warning("%s ended with status %d and is restarted with its sessions", self.name, status)

    def stop(self) -> None:
        """Let the process finish its running work and end; `run` returns when it has ended."""
        self._is_stopping = True
        self.is_up.clear()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
