"""A custom executor for the label "own", and an environment with turn rewards for other labels."""

import copy

import numpy as np

from openrlhf.agents.answers import EngineRefusal
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor

CLOSED = []


class Shop(AgentInstanceBase):
    async def __init__(self, prices):
        self.prices = prices

    async def step(self, states, **kwargs):
        if states["label"] == "closed?":
            return {"rewards": len(CLOSED), "environment_feedback": "", "done": True}
        turn = states["turn"]
        return {"rewards": self.prices[turn], "environment_feedback": "+", "done": turn == 1}

    async def close(self):
        CLOSED.append(self)


class Turns(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Shop, env_kwargs={"prices": [0.25, 4.0]}, turn_rewards=True)


class AgentExecutor(AgentExecutorBase):
    def __init__(self):
        self.turns = Turns()

    async def execute(self, **arguments):
        if arguments["label"] != "own":
            return await self.turns.execute(**arguments)
        tokens = arguments["hf_tokenizer"](arguments["prompt"])["input_ids"]
        params = copy.deepcopy(arguments["sampling_params"])
        params.max_tokens = 1
        params.seed = 77
        params.temperature = np.float32(0.5)
        try:
            await arguments["llm_engine"].generate([], params)
        except EngineRefusal as refusal:
            assert "0 tokens" in str(refusal)
        answer = await arguments["llm_engine"].generate(
            prompt_token_ids=tokens, sampling_params=params
        )
        output = answer.outputs[0]
        chosen = [
            entry[token].logprob
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
        return {
            "prompt": arguments["prompt"],
            "label": arguments["label"],
            "observation_tokens": answer.prompt_token_ids + output.token_ids,
            "action_ranges": [(len(tokens), len(tokens) + len(output.token_ids))],
            "rollout_log_probs": [0.0] * len(tokens) + chosen,
            "reward": float(output.text == arguments["hf_tokenizer"].decode(output.token_ids)),
            "truncated": output.finish_reason == "length",
        }
