"""`--vllm.engine_args`: the arguments that users can set, and their validation by vLLM."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest

from openrlhf.config.engine_args import REFUSED
from openrlhf.config.flags import flags_of
from openrlhf.config.options import ConfigError
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.rollout import VLLMConfig
from openrlhf.launch.start import run_ppo
from openrlhf.rollout import engine_check
from openrlhf.rollout.engine_settings import EngineSettings, engine_arguments
from tests.config.commands import WITH_OLD, ppo, violations

# Arguments set according to the machine instead of by a flag; users can override them.
LEFT_TO_THE_USER = {
    "block_size",
    "kv_cache_memory_bytes",
    "compilation_config",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    "disable_log_stats",
    "use_tqdm_on_load",
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_engine_argument_is_set_by_a_flag_or_by_the_user(device) -> None:
    settings = EngineSettings(
        model="m", vllm=VLLMConfig(dtype="fp32"), max_model_len=64, device=device
    )
    refused = [pattern for patterns in REFUSED.values() for pattern in patterns]
    allowed = {
        name
        for name in engine_arguments(settings, 0)
        if f"vllm.{name}" not in flags_of(PPOConfig)
        and not any(fnmatch(name, pattern) for pattern in refused)
    }
    assert allowed <= LEFT_TO_THE_USER


def test_user_arguments_take_precedence() -> None:
    vllm = VLLMConfig(dtype="fp32", engine_args={"block_size": 64, "max_num_seqs": 3})
    settings = EngineSettings(model="m", vllm=vllm, max_model_len=64)
    arguments = engine_arguments(settings, 0)
    assert (arguments["block_size"], arguments["max_num_seqs"]) == (64, 3)


ENGINE_COMMANDS = [
    command for command, root in WITH_OLD.items() if "vllm.engine_args" in flags_of(root)
]


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_flags_suggested_instead_of_an_argument_exist_in_the_command(command: str) -> None:
    ours = flags_of(WITH_OLD[command]).keys()
    for text in REFUSED:
        named = set(re.findall(r"--([a-z]+(?:\.[a-z_]+)+)", text))
        assert not named or ours & named, text


def test_evaluation_message_names_its_own_model_flag() -> None:
    (sentence,) = violations("eval", '--vllm.engine_args {"tokenizer":"x"}')
    assert "tokenizer" in sentence and "--model.model_name_or_path" in sentence


def test_dry_run_names_every_argument_that_vllm_would_reject() -> None:
    config = ppo(
        "--dry_run --vllm.engine_args "
        '{"max_num_seq":8,"max_num_seqs":"8","scheduling_policy":"fastest",'
        '"async_scheduling":true,"attention_backend":"FLASH_ATTN",'
        '"speculative_config":{"method":"ngram","num_speculative_token":2,'
        '"prompt_lookup_max":3}}'
    )
    with pytest.raises(ConfigError) as caught:
        run_ppo(config)
    unknown, of_type, of_choice, draft = caught.value.violations
    for text in caught.value.violations:
        assert text.startswith("--vllm.engine_args")
    assert "max_num_seq." in unknown and "max_num_seqs" in unknown
    assert 'max_num_seqs is "8"' in of_type
    assert 'scheduling_policy is "fastest"' in of_choice
    assert "speculative_config: " in draft
    assert "num_speculative_token." in draft and "num_speculative_tokens" in draft


def test_validation_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_check, "TIMEOUT_S", 0.01)
    [finding] = engine_check.check_engine_args({"max_num_seqs": 4})
    assert finding.fails and "--vllm.engine_args" in finding.seen
