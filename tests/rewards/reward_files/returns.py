"""Invalid and unusual return values. The first label selects the return value of `returns`."""

import math


class Opaque:
    pass


ANSWERS = {
    "nothing": None,
    "nan": {"rewards": [math.nan]},
    "infinite": {"rewards": math.inf},
    "two": {"rewards": [1.0, 2.0]},
    "text": {"rewards": "good"},
    "no rewards": {"reward": [1.0]},
    "bad scores": {"rewards": 1.0, "scores": [math.nan]},
    "bad logs": {"rewards": 1.0, "extra_logs": {"note": "fine"}},
    "logs as a list": {"rewards": 1.0, "extra_logs": [1.0]},
    "opaque": {"rewards": Opaque()},
    "zero score": {"rewards": 2, "scores": 0.0},
    "true": {"rewards": True},
    "bare": 0.25,
}


def returns(queries, prompts, labels):
    if labels[0] == "raises":
        raise ZeroDivisionError("nobody divides by that")
    return ANSWERS[labels[0]]
