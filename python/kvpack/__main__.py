"""The command ``kvpack``: ``kvpack --help``, or ``python -m kvpack --help``."""

import os
import signal
import sys

from . import _kvpack


def main() -> int:
    """Runs the command with the arguments of the process and returns its exit code."""
    command = getattr(_kvpack, "command", None)
    if command is None:
        hint = "it was built with --no-default-features; build it with --features command"
        print(f"error: this wheel of kvpack has no command: {hint}", file=sys.stderr)
        return 2
    # The command runs outside of the interpreter, whose own handler would wait for it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Mesa's device-select layer asks for a display and complains on standard error where there is none.
    if "XDG_RUNTIME_DIR" not in os.environ:
        os.environ.setdefault("NODEVICE_SELECT", "1")
    return command([sys.executable, "-m", "kvpack"], sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
