"""Reward functions that query a remote engine. The label names the engine's model."""

from openrlhf.utils import ServerError, remote_engine


def asked(prompts, labels):
    timeout = 0.5 if labels[0] == "slow" else None
    return remote_engine("helper", labels[0], timeout=timeout), [
        {"role": "user", "content": prompts[0]}
    ]


def plain(queries, prompts, labels):
    engine, messages = asked(prompts, labels)
    return [float(engine.chat_sync(messages) == "SAY E:")]


async def waits(queries, prompts, labels):
    engine, messages = asked(prompts, labels)
    return [float(await engine.chat(messages) == "SAY E:")]


def catches(queries, prompts, labels):
    engine, messages = asked(prompts, labels)
    try:
        return [float(engine.chat_sync(messages) == "SAY E:")]
    except ServerError:
        return [-1.0]


def unknown(queries, prompts, labels):
    remote_engine("gone")
