"""An agent written for releases 0.8.7 to 0.9.0: it puts results into a queue."""

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        self.result_queue = result_queue

    async def execute(self, prompt, label, sampling_params):
        await self.result_queue.put({"prompt": prompt})
