"""A typical user's reward file: checks for an exact match, adds a metric and prints a line."""

from neighbour import normalised  # a file in the same folder

LOADED = [0]
LOADED[0] += 1


def reward_func(queries, prompts, labels, **kwargs):
    print(f"scoring {len(queries)} samples")
    assert not kwargs
    matches = [
        float(normalised(query.removeprefix(prompt)) == normalised(label))
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    calls = [float(len(queries))] * len(queries)
    return {
        "rewards": matches,
        "scores": [match / 2 for match in matches],
        "extra_logs": {"calls": calls},
    }
