"""A plugin that slows down the reference, the critic and the reward model.

The plugin records when each of the three models was busy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from openrlhf.workers.critic import CriticWorker
from openrlhf.workers.frozen import ReferenceWorker, RewardWorker

DELAY_S = 0.2
SPANS = Path(__file__).with_name("spans.jsonl")


def delayed(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs `work` and then sleeps for `DELAY_S` seconds."""

    def method(self: Any, rows: Any) -> Any:
        began = time.time()
        with SPANS.open("a") as file:  # the new file lets the waiting agents continue
            result = work(self, rows)
            time.sleep(DELAY_S)
            file.write(
                json.dumps({"role": type(self).__name__, "began": began, "ended": time.time()})
                + "\n"
            )
        return result

    method.__name__ = work.__name__
    return method


if ray.is_initialized() and ray.get_runtime_context().get_actor_id():  # only in Ray actors
    ReferenceWorker.logprobs = delayed(ReferenceWorker.logprobs)
    CriticWorker.values = delayed(CriticWorker.values)
    RewardWorker.rewards = delayed(RewardWorker.rewards)
