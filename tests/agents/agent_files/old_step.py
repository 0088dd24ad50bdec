"""An agent written for releases up to 0.8.6: a function that maps text to text."""

import torch


async def step(observation, action, label, **kwargs):
    assert kwargs["sampling_params"].temperature == 1.0
    done = observation.count("=") >= 2
    return {
        "rewards": torch.tensor([float(len(action))]),
        "scores": torch.tensor([0.5]),
        "next_observation": observation + action + ("" if done else "+0="),
        "done": done,
        "sampling_params": kwargs["sampling_params"],
        "extra_logs": {"actions": torch.tensor([1.0])},
    }
