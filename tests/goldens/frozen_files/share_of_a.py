"""A reward file: the fraction of the response's characters that are the letter a."""


def reward_func(queries, prompts, labels):
    shares = []
    for query, prompt in zip(queries, prompts, strict=True):
        response = query.removeprefix(prompt)
        shares.append(response.count("a") / max(1, len(response)))
    return {"rewards": shares, "scores": shares, "extra_logs": {"share": shares}}
