"""How much of the server's code a chat runs through on its way to the engine, as `onbeat serve` runs it.

    python -m benchmarks.check.served_path [--files]

From the first byte of the request to the message that takes it to the only replica, which stands in for a
GPU. Functions that run beside it by chance are in one of three chats alone, and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

from benchmarks.check.paths import SOURCES
from benchmarks.harness.servers import free_port
from onbeat.cli.main import build_parser
from onbeat.cli.serve import run
from onbeat.cluster.wire import Wire
from tests.cpu.e2e.tiny_directory import write_tiny_directory

CHAT = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 4}
NUM_CHATS = 3


class Watch:
    """Notes the functions that run, in any thread, while it is told to."""

    def __init__(self) -> None:
        self.is_on = False
        self.codes: set[CodeType] = set()

    def note(self, frame: FrameType, event: str, _arg: object) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            self.codes.add(frame.f_code)
            self.is_on = frame.f_code is not Wire.send.__code__

    def start(self) -> None:
        """Look from now on, in this thread and in those that it starts."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)


def ask(url: str, watch: Watch, found: list[set[CodeType]]) -> None:
    """Send chats, of which the first only warms up, and note what each runs through; then end the server."""
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=60).read()
            break
        except OSError:
            time.sleep(0.1)
    body = json.dumps(CHAT).encode()
    for index in range(1 + NUM_CHATS):
        watch.codes, watch.is_on = set(), index > 0
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", body, {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).read()
        found.append(watch.codes)
    os.kill(os.getpid(), signal.SIGTERM)


def serve_chats() -> Counter[str]:
    """Return how many functions of each file a chat runs through."""
    port = free_port()
    watch, found = Watch(), list[set[CodeType]]()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_directory(Path(folder) / "model")
        stand_in = ["--load-format", "stand-in", "--device", "h100-sxm", "--max-model-len", "4096"]
        args = build_parser().parse_args(["serve", str(model), "--port", str(port), *stand_in])
        client = threading.Thread(target=ask, args=(f"http://127.0.0.1:{port}", watch, found))
        client.start()
        watch.start()
        run(args)
        client.join()
    codes = set.intersection(*found[1:])
    named = [code for code in codes if not code.co_name.startswith("<")]
    return Counter(code.co_filename.removeprefix(SOURCES) for code in named)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="each file, with its functions")
    args = parser.parse_args()
    functions = serve_chats()
    print(f"chat: {functions.total()} functions in {len(functions)} files")
    for path in sorted(functions) if args.files else ():
        print(f"    {functions[path]:3} {path}")


if __name__ == "__main__":
    main()
