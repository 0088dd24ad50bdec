"""Agents that use only the stock OpenAI client. The episode's label selects the agent."""

import threading
import time
from contextlib import suppress

import httpx
from openai import APIError, BadRequestError, OpenAI

from openrlhf.utils.agent import OpenAIAgentExecutor

LEFT = []  # each earlier episode's set of unfinished requests


class AgentExecutor(OpenAIAgentExecutor):
    def run_agent(self, prompt, label, session_id):
        client = OpenAI(base_url=self.session_url(session_id), api_key="none", max_retries=0)
        return getattr(self, label)(client, prompt, session_id)

    def talk(self, client, prompt, session_id):
        """Run three turns; send the second to the shared URL, with the session id in the body."""
        messages = [{"role": "user", "content": prompt}]
        for turn in range(3):
            where = client if turn != 1 else client.with_options(base_url=self.base_url)
            answer = where.chat.completions.create(
                model="any", messages=messages, logprobs=True, extra_body={"session_id": session_id}
            )
            [choice] = answer.choices
            assert (
                len(choice.logprobs.content)
                == answer.usage.completion_tokens
                == len(choice.model_extra["token_ids"])
            )
            messages += [choice.message, {"role": "user", "content": "+1"}]
        return {"reward": 1.0, "scores": 0.5, "extra_logs": {"turns": 3}}

    def stream(self, client, prompt, session_id):
        messages = [{"role": "user", "content": prompt}]
        events = list(client.chat.completions.create(model="any", messages=messages, stream=True))
        said = "".join(event.choices[0].delta.content or "" for event in events)
        assert events[-1].choices[0].finish_reason in ("stop", "length")
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "+"}]
        client.chat.completions.create(model="any", messages=messages, max_tokens=1)
        return float(len(said))

    def look(self, client, prompt, session_id):
        """Call every endpoint except the chat endpoint."""
        [model] = client.models.list().data
        root = self.base_url.removesuffix("/v1")
        assert httpx.get(f"{root}/health").status_code == 200
        chat = [{"role": "user", "content": "12"}]
        counted = httpx.post(f"{root}/tokenize", json={"messages": chat}).json()
        assert counted["count"] == len(counted["tokens"])
        assert counted["max_model_len"] == model.model_extra["max_model_len"]
        assert httpx.post(f"{root}/tokenize", json={"prompt": "12"}).json()["count"] == 2
        first, again = (
            client.chat.completions.create(model="any", messages=chat) for _ in range(2)
        )
        assert first.choices == again.choices
        return counted["count"]

    def err(self, client, prompt, session_id):
        """Send requests that the server rejects with a reason, then continue the session."""
        refused = []
        for change in (
            {"messages": []},
            {"messages": [{"role": "user", "content": "1" * 200}]},
            {"extra_query": {}, "n": 2},
        ):
            try:
                client.chat.completions.create(
                    **{"model": "any", "messages": [{"role": "user", "content": "1"}], **change}
                )
            except BadRequestError as error:
                refused.append(error.code)
            except Exception as error:
                refused.append(type(error).__name__)
        assert refused == ["invalid_request", "context_length_exceeded", "invalid_request"], refused
        elsewhere = client.with_options(base_url=self.session_url("nowhere"))
        try:
            elsewhere.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "1"}]
            )
        except BadRequestError as error:
            assert "there is no session 'nowhere'" in error.message
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "1"}])
        return 1.0

    def give_up(self, client, prompt, session_id):
        """Abandon the second request, which is cancelled when the episode ends."""
        messages = [{"role": "user", "content": prompt}]
        first = client.chat.completions.create(model="any", messages=messages)
        requests = self._sessions[session_id].requests
        LEFT.append(requests)
        messages += [first.choices[0].message, {"role": "user", "content": "+"}]
        ask = threading.Thread(target=self.ask, args=(client, messages), daemon=True)
        ask.start()
        while not requests:
            time.sleep(0.01)
        return float(sum(map(len, LEFT[:-1])))

    def ask(self, client, messages):
        with suppress(APIError):
            client.chat.completions.create(model="any", messages=messages)

    def summarise(self, client, prompt, session_id):
        """Run two turns, then start a new conversation."""
        messages = [{"role": "user", "content": prompt}]
        first = client.chat.completions.create(model="any", messages=messages).choices[0].message
        messages += [first, {"role": "user", "content": "+1"}]
        client.chat.completions.create(model="any", messages=messages)
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "12"}])
        return 1.0

    def silent(self, client, prompt, session_id):
        return 1.0
