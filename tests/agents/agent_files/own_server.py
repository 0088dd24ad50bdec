"""An executor that runs an OpenAI-compatible server in a thread.

The server samples from the engine of the first episode.
"""

import socket
import threading
import uuid

import uvicorn
from fastapi import FastAPI, Request
from openai import AsyncOpenAI

from openrlhf.utils.agent import AgentExecutorBase, SamplingParams


class AgentExecutor(AgentExecutorBase):
    client = None

    def serve(self, engine, tokenizer):
        self.traces = {}  # maps a session to its requests' (prompt, output) pairs
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(request: Request):
            body = await request.json()
            trace = self.traces.setdefault(body["session_id"], [])
            tokens = trace[-1][0] + list(trace[-1][1].token_ids) if trace else []
            tokens += tokenizer(body["messages"][-1]["content"], add_special_tokens=False)[
                "input_ids"
            ]
            sampling_params = SamplingParams(
                max_tokens=body["max_tokens"], temperature=body["temperature"], logprobs=1
            )
            output = (await engine.generate(tokens, sampling_params)).outputs[0]
            trace.append((tokens, output))
            message = {"role": "assistant", "content": output.text}
            return {
                "object": "chat.completion",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }

        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
        self.client = AsyncOpenAI(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1", api_key="none"
        )

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        if self.client is None:
            self.serve(llm_engine, hf_tokenizer)
        session = uuid.uuid4().hex
        for text in (prompt, "+1="):
            await self.client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": text}],
                max_tokens=sampling_params.max_tokens,
                temperature=sampling_params.temperature,
                extra_body={"session_id": session},
            )
        trace = self.traces.pop(session)
        tokens, output = trace[-1]
        return {
            "observation_tokens": tokens + list(output.token_ids),
            "action_ranges": [
                (len(before), len(before) + len(said.token_ids)) for before, said in trace
            ],
            "rollout_log_probs": None,
            "reward": 1.0,
        }
