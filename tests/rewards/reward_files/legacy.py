"""Reward functions in the style of older releases, with other signatures and tensors."""

import torch


def without_labels(queries, prompts):
    return torch.tensor([float(len(query)) for query in queries])


def other_names(texts, starts, answers):
    return {
        "rewards": torch.tensor(
            [
                [float(text == start + answer)]
                for text, start, answer in zip(texts, starts, answers, strict=True)
            ]
        )
    }


def keywords_only(*, labels, queries, **kwargs):
    return {
        "rewards": [float(label in query) for label, query in zip(labels, queries, strict=True)]
    }


async def asynchronous(queries, prompts, labels):
    return torch.ones(len(queries), requires_grad=True)


def bfloat16(queries, prompts, labels):
    return {
        "rewards": torch.full((len(queries), 1), 0.5, dtype=torch.bfloat16),
        "extra_logs": {"length": torch.tensor(3)},
    }


def of_another_trainer(prompts, completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def of_a_response(response, answer):
    return [float(response == answer)]


def of_an_answer(text, answer):
    return [float(text == answer)]
