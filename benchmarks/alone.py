"""A command in a network namespace with loopback alone: Ray asks outside addresses, whatever its settings are."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence

#: Runs the command that follows it where nothing but loopback exists.
ALONE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
#: Ray without tokens and without reports of its use.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def can_be_alone() -> bool:
    """Whether this machine lets us make a network namespace."""
    has_tools = all(map(shutil.which, ("unshare", "ip")))
    return has_tools and subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


def is_alone() -> bool:
    """Whether there is no network but loopback."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def be_alone(module: str, arguments: Sequence[str]) -> None:
    """Start this program again in a network namespace, unless it runs in one."""
    if is_alone():
        return
    if not can_be_alone():
        raise ValueError(
            "Ray asks outside addresses: `unshare` must be allowed to make a network namespace without them."
        )
    command = [*ALONE, sys.executable, "-m", module, *arguments]
    os.execvpe(command[0], command, os.environ | ENVIRONMENT)
