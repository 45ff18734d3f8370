"""Starts the ranks of an engine: `python -m bros.transport.launcher FOLDER`.

    server ──▶ launcher (torch.distributed's) ──▶ rank 0 = engine process ◀══ ZeroMQ ══▶ server
                                              ├─▶ rank 1      ▲ plans, sums
                                              └─▶ rank 2 ...  ▼

Every rank runs process.py, with the same FOLDER and stdin. If a rank ends for any reason, the
launcher ends the others; if the launcher ends, the kernel kills its ranks.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from bros.engine.parent import end_with_server
from bros.transport.process import LaunchSpec


def main() -> int:
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        # These reach the whole process group; the server decides when to end. A handler rather than
        # SIG_IGN, because the ranks would inherit SIG_IGN.
        signal.signal(number, lambda number, frame: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which the ranks inherit
    end_with_server(folder)
    config = LaunchSpec.read(folder).config
    # Late, because these imports take seconds: first watch the server.
    from bros.core.errors import RanksLostError
    from bros.executor.parallel.launch import launch_ranks
    from bros.transport.ipc import send_failure

    if sys.flags.safe_path:  # see core/machine.py
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        # torch's launcher requires at least one signal to handle; nothing sends this one.
        launch_ranks(config.tp, "bros.transport.process", [str(folder)], signals=("SIGUSR2",))
        return 0
    except RanksLostError as error:
        print(f"ERROR bros.engine: {error}", file=sys.stderr)
        send_failure(folder, f"The engine ended: {error}.")
    except Exception as error:
        send_failure(folder, f"The engine's ranks could not be started: {error}")
        raise
    return 1


if __name__ == "__main__":
    sys.exit(main())
