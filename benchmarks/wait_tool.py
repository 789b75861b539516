"""What the model of `benchmarks.turns` calls."""

import asyncio


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"
