"""Run the command line: `python -m agent_runtime_core` is the same as `agent-runtime`."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
