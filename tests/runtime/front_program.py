"""A program with an AsyncLLM, for tests that kill it: `front_program.py MAX_TOKENS`.

It prints the engine's process id once its request runs, and the number of tokens once that has ended. SIGTERM drains
it.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from llmc_runtime import LlmcError, SamplingParams

from tests.runtime.async_kit import fake


async def main(tokens: int) -> None:
    llm = fake(0.05)
    await llm.start()
    closing: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: closing.append(asyncio.create_task(llm.shutdown(2.0))))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    count, outcome = 0, "finished"
    try:
        async for output in llm.generate({"prompt_token_ids": [50]}, params, "r"):
            if not count:
                print(llm.engine_pid, flush=True)
            count = len(output.outputs[0].token_ids)
    except LlmcError as e:
        outcome = e.code
    print(count, outcome, flush=True)
    await asyncio.gather(*closing)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
