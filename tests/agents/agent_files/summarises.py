"""An agent that runs two turns, then starts a new conversation with a summary."""

from openai import AsyncOpenAI

from openrlhf.utils.agent import OpenAIAgentExecutor


class AgentExecutor(OpenAIAgentExecutor):
    async def run_agent(self, prompt, label, session_id):
        async with AsyncOpenAI(base_url=self.session_url(session_id), api_key="none") as client:
            messages = [{"role": "user", "content": prompt}]
            first = await self.say(client, messages)
            second = await self.say(client, [*messages, first, {"role": "user", "content": "2"}])
            last = await self.say(
                client, [{"role": "user", "content": f"{prompt}+{len(second['content'])}"}]
            )
        return float(last["content"].count("1"))

    async def say(self, client, messages):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return {"role": "assistant", "content": answer.choices[0].message.content}
