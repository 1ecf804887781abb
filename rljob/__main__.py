"""`rljob` and `kubectl rljob`: the door. Imports nothing but the command line; each command imports what it needs."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from rljob.app import app

        app(prog_name="kubectl rljob" if sys.argv[0].endswith("kubectl-rljob") else "rljob")
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(130)


if __name__ == "__main__":
    main()
