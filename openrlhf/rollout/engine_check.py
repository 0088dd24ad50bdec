"""Asks vLLM whether `--vllm.engine_args` are arguments of its engine: names, and the types of their
values.

The check runs in its own process, which takes 5 s. Importing vLLM changes the environment, which
later processes would inherit.
"""

import dataclasses
import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf.config.engine_args import drafting
from openrlhf.config.options import ConfigError
from openrlhf.rollout.engine_settings import Device, engine_environment


def check_engine_args(extra: Mapping[str, Any], device: Device) -> None:
    """Raise ConfigError for an unknown argument of vLLM, or a value of another type. No device is
    touched.
    """
    if not extra:
        return
    answer = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(dict(extra)),
        env=os.environ | engine_environment(device),
        text=True,
        capture_output=True,
    )
    if answer.returncode:
        raise RuntimeError(f"vLLM could not be asked about --vllm.engine_args:\n{answer.stderr}")
    if mistakes := json.loads(answer.stdout.splitlines()[-1]):
        raise ConfigError(mistakes)


def mistakes_in(extra: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each argument that vLLM would refuse. Imports vLLM."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    yield from _mistakes_of(AsyncEngineArgs, extra, "--vllm.engine_args")
    yield from _mistakes_of(
        SpeculativeConfig, drafting(extra), "--vllm.engine_args speculative_config"
    )


def _mistakes_of(arguments: type, given: Mapping[str, Any], where: str) -> Iterator[str]:
    from pydantic import TypeAdapter, ValidationError

    known = {
        field.name: Any if isinstance(field.type, str) else field.type
        for field in dataclasses.fields(arguments)
    }
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            yield f"{where}: vLLM has no argument {name}" + (
                f". Is {near[0]} meant?" if near else "."
            )
            continue
        try:
            TypeAdapter(known[name]).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            if any(problem["type"] == "enum" for problem in error.errors()):
                continue  # vLLM takes the names of its enumerations, which pydantic does not
            reasons = "; ".join(dict.fromkeys(problem["msg"] for problem in error.errors()))
            yield f"{where}: {name} is {json.dumps(value)}, which vLLM does not take: {reasons}."


if __name__ == "__main__":
    print(json.dumps(list(mistakes_in(json.load(sys.stdin)))))
