"""An agent whose label selects how it fails."""

import asyncio
import os
import sys
import time

from openrlhf.utils.agent import SamplingParams, SingleTurnAgentExecutor


class AgentExecutor(SingleTurnAgentExecutor):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        if label == "raise before":
            raise ValueError("no such square")
        result = await super().execute(
            prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine
        )
        result["reward"] = 1.0
        if label == "raise":
            raise ValueError("no such square")
        elif label == "await for ever":
            await asyncio.sleep(1000)
        elif label == "swallow":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue
        elif label == "block":
            time.sleep(1000)
        elif label == "leave":
            sys.exit(3)
        elif label == "crash":
            os._exit(7)
        elif label == "memory":
            bytearray(1 << 40)
        elif label == "pause":
            await asyncio.sleep(0.7)
        elif label == "no dict":
            return [result]
        elif label == "nan":
            result["reward"] = float("nan")
        elif label == "no reward":
            result["reward"] = None
        elif label == "invented":
            result["observation_tokens"][-1] += 1
            result["rollout_log_probs"] = None
        elif label == "from the first token":
            result["action_ranges"] = [[0, len(result["observation_tokens"])]]
        elif label == "overlap":
            result["action_ranges"] = [[2, 5], [4, 6]]
        elif label == "outside":
            result["action_ranges"] = [[2, 5000]]
        elif label == "none sampled":
            result["action_ranges"] = []
        elif label == "too long a prompt":
            await llm_engine.generate([5] * 500, sampling_params)
        elif label == "own parameters":
            await llm_engine.generate([5], SamplingParams(max_tokens=3))
        elif label == "images":
            await llm_engine.generate([5], sampling_params, multi_modal_data={"image": []})
        return result
