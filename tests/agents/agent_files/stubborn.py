"""An agent that resists cancellation or disturbs other episodes in the way its label selects."""

import asyncio
import mmap
import os
import sys
import threading
import time

from openrlhf.utils.agent import AgentExecutorBase

TOGETHER = threading.Barrier(40)
HOARD = []


def allocate(size):
    """Allocate memory that counts as used even before it is written."""
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError from error


def note(folder, word):
    with open(os.path.join(folder, word), "w"):
        pass


def noted(folder, word):
    return sum(name.startswith(word) for name in os.listdir(folder))


class OddError(ValueError):
    failure = "of some device"


class AgentExecutor(AgentExecutorBase):
    cancelled = 0

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        match label:
            case "odd error":
                raise OddError("no such square")
            case "cancels itself":
                task = asyncio.create_task(asyncio.sleep(1000))
                task.cancel()
                await task
            case "asks again":
                while True:
                    try:
                        await llm_engine.generate([5], sampling_params)
                    except BaseException:
                        continue
            case "works":
                await asyncio.sleep(1)
            case "hoards":  # keep the memory allocated until the other episode runs out of memory
                HOARD.append(allocate(1200 << 20))
                note(prompt, "hoarded")
                while not noted(prompt, "lacking"):
                    await llm_engine.generate([5], sampling_params)
                HOARD.clear()
            case "modest":
                print("modest", flush=True)
                while not noted(prompt, "hoarded"):
                    await asyncio.sleep(0.01)
                try:
                    allocate(1000 << 20)
                except MemoryError:
                    note(prompt, "lacking")
                    raise
            case "meets":
                note(prompt, f"here {os.getpid()}")
                # Five processes take part: the shared process, then four processes with one episode
                # each.
                while not noted(prompt, "left") or noted(prompt, "here") < 5:
                    await asyncio.sleep(0.01)
            case "exits at the meeting":
                while not noted(prompt, "here"):
                    await asyncio.sleep(0.01)
                note(prompt, "left")
                os._exit(6)
            case "exits":
                await llm_engine.generate([5], sampling_params)
                sys.exit(6)
            case "exits in a callback":
                asyncio.get_running_loop().call_soon(sys.exit, 6)
                await asyncio.sleep(1000)
            case "asks in a thread":
                await asyncio.to_thread(asyncio.run, llm_engine.generate([5], sampling_params))
            case "crashes while it asks":
                asyncio.get_running_loop().call_later(0.1, os._exit, 7)
            case "block":
                await llm_engine.generate([5, 6], sampling_params)
                time.sleep(1000)
            case "hung thread":
                await asyncio.to_thread(time.sleep, 1000)
            case "forty threads":
                await asyncio.to_thread(TOGETHER.wait, 50)
            case "huge":
                return {"observation_tokens": [5], "extra_logs": {"x": "x" * (1 << 28)}}
        try:
            output = (await llm_engine.generate([5, 6], sampling_params)).outputs[0]
        except asyncio.CancelledError:
            type(self).cancelled += 1
            raise
        return {
            "observation_tokens": [5, 6, *output.token_ids],
            "action_ranges": [[2, 2 + len(output.token_ids)]],
            "extra_logs": {"pid": os.getpid(), "cancelled": type(self).cancelled},
        }
