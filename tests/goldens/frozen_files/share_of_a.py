"""A reward file: the share of the letter a in the response."""


def reward_func(queries, prompts, labels):
    shares = []
    for query, prompt in zip(queries, prompts, strict=True):
        response = query.removeprefix(prompt)
        shares.append(response.count("a") / max(1, len(response)))
    return {"rewards": shares, "scores": shares, "extra_logs": {"share": shares}}
