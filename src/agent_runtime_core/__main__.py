"""Run the command line: `python -m agent_runtime_core` is the same as `agent-runtime`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from .cli.main import main
    except KeyboardInterrupt:  # Ctrl-C right after the start
        sys.exit(130)
    sys.exit(main())
