"""`--vllm.engine_args`: what is left to the user, and that vLLM itself is asked about it."""

from __future__ import annotations

import re

import pytest

from openrlhf.config.engine_args import FLAGS, REASONS
from openrlhf.config.flags import flags_of
from openrlhf.config.options import ConfigError
from openrlhf.config.rollout import VLLMConfig
from openrlhf.launch.start import run_ppo
from openrlhf.rollout.engine_settings import EngineSettings, engine_arguments
from tests.config.commands import WITH_OLD, ppo, violations

# Made from the machine and not from a flag: a user may know better.
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
def test_what_an_engine_is_made_of_belongs_to_a_flag_or_to_the_user(device) -> None:
    settings = EngineSettings(
        model="m", vllm=VLLMConfig(dtype="fp32"), max_model_len=64, device=device
    )
    assert set(engine_arguments(settings, 0)) - FLAGS.keys() - REASONS.keys() <= LEFT_TO_THE_USER


def test_what_the_user_gives_wins() -> None:
    vllm = VLLMConfig(dtype="fp32", engine_args={"block_size": 64, "max_num_seqs": 3})
    settings = EngineSettings(model="m", vllm=vllm, max_model_len=64)
    arguments = engine_arguments(settings, 0)
    assert (arguments["block_size"], arguments["max_num_seqs"]) == (64, 3)


ENGINE_COMMANDS = [
    command for command, root in WITH_OLD.items() if "vllm.engine_args" in flags_of(root)
]


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_a_flag_that_is_named_instead_is_one_of_the_commands(command: str) -> None:
    ours = flags_of(WITH_OLD[command]).keys()
    for text in FLAGS.values():
        assert ours & set(re.findall(r"[a-z]+(?:\.[a-z_]+)+", text)), text
    assert set(re.findall(r"--([a-z._]+)", " ".join(REASONS.values()))) <= ours


def test_an_evaluation_is_told_its_own_flag_of_the_model() -> None:
    (sentence,) = violations("eval", '--vllm.engine_args {"tokenizer":"x"}')
    assert (
        "tokenizer (use --actor.model_name_or_path; in eval and batch_inference --model.model_name_or_path)"
        in sentence
    )


def test_a_dry_run_ends_with_what_vllm_does_not_know() -> None:
    config = ppo(
        '--dry_run --vllm.engine_args {"max_num_seq":8,"max_num_seqs":"8","scheduling_policy":"fastest","async_scheduling":true,'
        '"attention_backend":"FLASH_ATTN","speculative_config":{"method":"ngram","num_speculative_token":2,"prompt_lookup_max":3}}'
    )
    with pytest.raises(ConfigError) as caught:
        run_ppo(config)
    found = caught.value.violations
    assert [text.split(": ")[1].split(",")[0] for text in found] == [
        "vLLM has no argument max_num_seq. Is max_num_seqs meant?",
        'max_num_seqs is "8"',
        'scheduling_policy is "fastest"',
        "vLLM has no argument num_speculative_token. Is num_speculative_tokens meant?",
    ]
    assert found[-1].startswith("--vllm.engine_args speculative_config: ")
