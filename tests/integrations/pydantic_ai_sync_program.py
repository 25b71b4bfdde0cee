"""The agent of pydantic_ai_program.py with `run_sync` in a plain run. Usage: see framework_kills.py."""

from __future__ import annotations

import asyncio

from tests.integrations.pydantic_ai_program import PlainShop, main

if __name__ == "__main__":
    asyncio.run(main(PlainShop()))
