"""Lets vLLM itself validate the argument names and value types in `--vllm.engine_args`.

The check takes 5 s. The check runs in a separate process, because importing vLLM changes the
environment that later processes would inherit.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from openrlhf.checks import Finding
from openrlhf.config.engine_args import drafting
from openrlhf.config.flags import did_you_mean, nearest
from openrlhf.rollout.engine_settings import engine_device, engine_environment

TIMEOUT_S = 300.0


def check_engine_args(extra: Mapping[str, Any]) -> list[Finding]:
    """Return a failure for each argument that is unknown to vLLM or has a value of the wrong type.

    The check uses no device.
    """
    if not extra:
        return []
    try:
        answer = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(dict(extra)),
            env=os.environ | engine_environment(engine_device()),
            text=True,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        late = f"vLLM did not validate --vllm.engine_args within {TIMEOUT_S:g} s."
        return [Finding(late, "Run openrlhf doctor, which tests whether vLLM works.", fails=True)]
    if answer.returncode:
        raise RuntimeError(f"vLLM could not validate --vllm.engine_args:\n{answer.stderr}")
    mistakes = json.loads(answer.stdout.splitlines()[-1])
    return [Finding(mistake, fails=True) for mistake in mistakes]


def mistakes_in(extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each argument that would be rejected by vLLM. Imports vLLM."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    flag = "--vllm.engine_args"
    yield from _mistakes_of(AsyncEngineArgs, extra, flag)
    yield from _mistakes_of(SpeculativeConfig, drafting(extra), f"{flag} speculative_config")


def _mistakes_of(arguments: type, given: Mapping[str, Any], where: str) -> Iterator[str]:
    from pydantic import TypeAdapter, ValidationError

    types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(arguments)}
    for name, value in given.items():
        if name not in types:
            yield f"{where}: vLLM has no argument {name}.{did_you_mean(nearest(name, types))}"
            continue
        if isinstance(types[name], str):  # an annotation that only vLLM can evaluate
            continue
        text = json.dumps(value)
        try:
            TypeAdapter(types[name]).validate_json(text, strict=True)
        except ValidationError as error:
            problems = error.errors()
            if any(problem["type"] == "enum" for problem in problems):
                continue  # vLLM accepts the names of its enum members, but pydantic does not
            reasons = "; ".join(dict.fromkeys(problem["msg"] for problem in problems))
            yield f"{where}: {name} is {text}, which vLLM does not accept: {reasons}."


if __name__ == "__main__":
    print(json.dumps(list(mistakes_in(json.load(sys.stdin)))))
