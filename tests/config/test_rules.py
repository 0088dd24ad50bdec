"""For each rule, a command line that breaks the rule and the flags that the message must name."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from openrlhf.config import machine, sampling_rules, training_rules
from openrlhf.config.flags import amend, flags_of, spelled_out, value_violations
from openrlhf.config.options import ConfigError, parse_config
from openrlhf.config.pipeline import PipelineConfig
from openrlhf.config.ppo import PPOConfig
from tests.config.commands import COMMANDS, ROOTS, SMALLEST, parse, ppo, read_flags, sft, violations
from tests.sources import package

SFT, RL = "train_sft", "train_ppo_ray"
RULE = re.compile(r"\w*(violations|notices)")  # matches functions that yield messages
GROUPS = "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 2"

# Each row has a command, flags that break a rule, and text that the message must contain.
BROKEN: list[tuple[str, str, str]] = [
    (SFT, "--data.dataset ./gone", "--data.dataset ./gone does not exist"),
    (SFT, "--data.dataset a,gone.jsonl", "--data.dataset gone.jsonl does not exist"),
    (SFT, "--model.model_name_or_path /gone/m", "--model.model_name_or_path /gone/m"),
    (RL, "--data.prompt_dataset old.py@dir", "--data.prompt_dataset old.py is a Python script"),
    (RL, "--eval.dataset ~/gone/a/b", f"--eval.dataset {Path.home()}/gone/a/b does not exist"),
    (SFT, "--ds.param_dtype fp32 --ds.attn_implementation flash_attention_2",
     "--ds.param_dtype fp32 needs --ds.attn_implementation sdpa"),
    (SFT, "--ds.attn_implementation fast",
     "--ds.attn_implementation fast is unknown: use flash_attention_2"),
    (SFT, "--train.batch_size 12 --train.micro_batch_size 8",
     "--train.batch_size 12 on 1 rank(s) (the launcher started 1) gives each rank 12 samples, "
     "not a multiple of --train.micro_batch_size 8: use --train.micro_batch_size 6"),
    (SFT, "--ds.param_dtype fp32 --ds.zero_stage 0 --ds.grad_accum_dtype bf16",
     "--ds.grad_accum_dtype bf16 needs --ds.zero_stage 1, 2 or 3 with --ds.param_dtype fp32"),
    (SFT, "--data.multiturn --data.layout columns",
     "--data.multiturn needs --data.apply_chat_template"),
    (SFT, "--data.tokenizer_chat_template gone.jinja",
     "--data.tokenizer_chat_template gone.jinja is neither a template"),
    (SFT, "--data.output_key= --data.layout columns", "name it with --data.output_key"),
    ("train_kd", "--kd.teacher_model http://host:8000/v1",
     "--kd.teacher_model http://host:8000/v1 is a server, which returns only"),
    ("train_kto", "--train.batch_size 1", "--train.batch_size 1 is too small for KTO's KL"),
    (RL, "--vllm.num_engines 0", "--vllm.num_engines is 0"),
    (RL, "--vllm.max_engines 0", "--vllm.max_engines is 0, but it must be at least 1"),
    (RL, "--train.async_enable --train.max_staleness 0",
     "--train.max_staleness is 0, but it must be at least 1"),
    (RL, "", "--reward.remote_url (a .py file or a URL)"),
    (RL, "--reward.remote_url gone.py", "--reward.remote_url gone.py must be http(s) URLs"),
    (RL, "--reward.remote_url localhost:5000", "localhost:5000 must be http(s) URLs"),
    (RL, "--reward.remote_url gone.py,http://h", "must be http(s) URLs, or one .py file"),
    (RL, "--train.agent_func_path gone.py", "--train.agent_func_path gone.py is not"),
    (RL, f"--train.agent_func_path {__file__} --reward.on_error 0",
     "that an agent did not finish: use fail or drop"),
    (RL, "--rollout.remote_engines judge=localhost:8000 http://h:x/v1",
     "--rollout.remote_engines localhost:8000 http://h:x/v1 is not an http(s) "
     "URL: use NAME=http"),
    (RL, "--rollout.remote_engines http://a/v1 0=http://b/v1",
     "--rollout.remote_engines http://a/v1 0=http://b/v1 contains a name twice"),
    (RL, "--reward.model_name_or_path a,b --reward.verifier math --reward.weights 1 1",
     "--reward.weights 1 1 has 2 numbers for 3 rewards"),
    (RL, "--reward.verifier code --data.label_key= --data.layout columns",
     "--reward.verifier code checks responses against labels"),
    (RL, "--reward.on_error zero", "--reward.on_error takes fail, drop or a number"),
    (RL, "--algo.advantage.estimator rloo", "--rollout.n_samples_per_prompt is 1"),
    (RL, "--algo.advantage.estimator group_norm", "estimator group_norm compares"),
    (RL, "--algo.advantage.estimator dr_grpo", "estimator dr_grpo compares"),
    (RL, "--algo.advantage.estimator reinforce_baseline", "reinforce_baseline compares"),
    (RL, "--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_enable filters prompts"),
    (RL, "--algo.dynamic_filtering_range 1 0", "--algo.dynamic_filtering_range is 1 0"),
    (RL, "--reward.clip_range 5 5", "--reward.clip_range is 5 5"),
    (RL, "--algo.advantage.is_correction_threshold 5 1", "is_correction_threshold is 5 1"),
    (RL, "--algo.correction.band 2 1", "is_correction_threshold is 2 1"),
    (RL, "--algo.advantage.is_correction_threshold 0", "is_correction_threshold is 0 0"),
    (RL,
     "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip "
     "--algo.advantage.is_correction_gating tv --algo.advantage.is_correction_threshold 0.1",
     "is_correction_mode clip clips a ratio"),
    (RL,
     "--algo.advantage.is_correction_level token "
     "--algo.advantage.is_correction_gating binary_kl",
     "is_correction_gating binary_kl has an upper bound only"),
    (RL,
     "--algo.advantage.is_correction_level seq-product --algo.advantage.is_correction_gating tv "
     "--algo.advantage.is_correction_threshold 0.1",
     "is_correction_level seq-product multiplies ratios"),
    (RL, "--algo.advantage.estimator flash_reinforce --rollout.batch_size 1 --train.batch_size 1",
     "estimator flash_reinforce compares the samples of a batch"),
    (RL, "--actor.policy_loss_type cispo --actor.dual_clip 3",
     "--actor.dual_clip 3 cannot be combined with --actor.policy_loss_type cispo"),
    (RL, "--algo.distill.teacher t --algo.distill.coef 0",
     "With --algo.distill.coef 0, --algo.distill.teacher has no effect"),
    (RL,
     "--algo.distill.teacher wise --rollout.remote_engines wise=http://h/v1 "
     "--rollout.temperature 0.7",
     "--rollout.temperature 0.7 cannot be combined with the server --algo.distill.teacher wise"),
    (RL, "--algo.ptx.dataset d --algo.ptx.coef 0",
     "With --algo.ptx.coef 0, --algo.ptx.dataset has no effect"),
    (RL, "--algo.kl.stop_run 0.1 --algo.kl.init_coef 0",
     "--algo.kl.stop_run 0.1 needs the KL to the reference"),
    (RL, "--rollout.temperature 0", "--rollout.temperature 0 selects greedy"),
    (RL, "--data.max_len 512 --rollout.max_new_tokens 512",
     "--rollout.max_new_tokens 512 leaves no room for a prompt in --data.max_len 512"),
    (RL, "--rollout.max_new_tokens 64 --reward.overlong_buffer_len 65",
     "--reward.overlong_buffer_len 65 exceeds the maximum response length, 64"),
    *[(command, f"--{model}.aux_loss_coef 0.01 --{model}.gradient_checkpointing_enable "
       f"--{model}.gradient_checkpointing_reentrant",
       f"--{model}.aux_loss_coef 0.01 would not reach the routers")
      for command, model in ((RL, "actor"), (SFT, "model"))],
    (RL, "--rollout.only --rollout.replay_dir .",
     "--rollout.only generates without training and --rollout.replay_dir . trains without"),
    (RL, "--rollout.replay_dir gone",
     "--rollout.replay_dir gone is not a folder on this machine: write one with"),
    (RL, "--algo.kl.target 0.1 --algo.kl.init_coef 0",
     "--algo.kl.target 0.1 needs the KL to the reference"),
    (RL, "--rollout.batch_size 48", "48 samples are not a multiple of --train.batch_size 128"),
    (RL, f"{GROUPS} --rollout.batch_size 100 --train.batch_size 64",
     "Set --rollout.batch_size 128 (256 samples), or change --train.batch_size"),
    (RL, f"{GROUPS} --rollout.batch_size 100 --train.batch_size 64",
     "--rollout.batch_size 100 x --rollout.n_samples_per_prompt 2 = 200 samples "
     "are not a multiple of --train.batch_size 64"),
    (RL, "--actor.num_gpus_per_node 3",
     "--train.batch_size 128 is not divisible by the 3 data-parallel ranks (--actor.num_nodes 1 x "
     "--actor.num_gpus_per_node 3): use 126 or 129"),
    (RL, "--train.micro_batch_size 48", "not a multiple of --train.micro_batch_size 48"),
    (RL, "--rollout.micro_batch_size 1025", "fewer than --rollout.micro_batch_size 1025"),
    (RL, "--rollout.vllm_generate_batch_size 512",
     "--rollout.vllm_generate_batch_size 512 is less than --rollout.batch_size 1024: raise "
     "it, or leave it out"),
    (RL, "--rollout.vllm_generate_batch_size 2048 --rollout.dump_dir dumped",
     "--rollout.vllm_generate_batch_size 2048 generates for several steps at once, but each file "
     "of --rollout.dump_dir"),
    (RL, '--vllm.engine_args {"seed":1,"dtype":"auto","max_num_seqs":8}',
     "--vllm.engine_args may not set seed: use --train.seed."),
    (RL, '--vllm.engine_args {"logprobs_mode":"raw_logprobs"}',
     "--vllm.engine_args may not set logprobs_mode: log-probabilities would not match"),
    (RL, '--vllm.engine_args {"speculative_config":{"method":"eagle","num_speculative_tokens":2}}',
     "speculative_config has the method 'eagle'"),
    (RL,
     '--vllm.engine_args '
     '{"speculative_config":{"method":"ngram","rejection-sample-method":"synthetic"}}',
     "with rejection_sample_method synthetic, log-probabilities do not match the distribution"),
    (RL,
     '--vllm.engine_args '
     '{"speculative_config":{"method":"ngram","num_speculative_tokens_per_batch_size":[[1,8,2]]}}',
     "Use num_speculative_tokens, or --rollout.seeded off"),
    (RL, "--vllm.max_engines 1 --vllm.num_engines 2",
     "--vllm.max_engines 1 is less than --vllm.num_engines 2"),
    (RL, "--vllm.sync_backend mpi", "--vllm.sync_backend mpi is unknown: use nccl, or gloo"),
    (RL, "--vllm.pipeline_parallel_size 2", "vLLM does not support pipeline parallelism on CPUs"),
    (RL, "--vllm.enable_sleep --train.async_enable",
     "with --train.async_enable engines never pause"),
    (RL, "--train.colocate_all --ref.num_gpus_per_node 2",
     "--train.colocate_all requires equal sizes, but the sizes are "
     "--actor.num_nodes 1 --actor.num_gpus_per_node 1 and --ref.num_nodes 1 "
     "--ref.num_gpus_per_node 2"),
    (RL, "--train.colocate_all --vllm.num_engines 2",
     "--vllm.num_engines 2 with 1 device(s) each exceeds --actor.num_nodes 1 x"),
    (RL, "--train.colocate_all --actor.num_gpus_per_node 4 --vllm.tensor_parallel_size 3",
     "3 does not divide --actor.num_gpus_per_node 4"),
    (RL, '--placement.vllm.resources {"fast":0}',
     "--placement.vllm.resources: fast is 0; pass a number above 0"),
    (RL, "--placement.cluster 2x8",
     "--placement.cluster 2x8 plans for a different cluster and requires --dry_run"),
    (RL, "--dry_run --placement.cluster 2x",
     "--placement.cluster 2x does not describe a cluster: use, for example, 2x8"),
    (RL, "--train.async_enable --rollout.only",
     "--rollout.only cannot be combined with --train.async_enable"),
    (RL, "--train.async_enable --rollout.dump_dir dumped",
     "--rollout.dump_dir dumped cannot be combined with --train.async_enable"),
    (RL, "--train.async_enable --rollout.replay_dir .",
     "--rollout.replay_dir . cannot be combined with --train.async_enable"),
    (SFT, "--ds.adam_offload --ds.zero_stage 0",
     "--ds.adam_offload needs --ds.zero_stage 1, 2 or 3"),
    (RL, "--ds.param_offload cpu", "--ds.param_offload cpu needs --ds.zero_stage 3"),
    (SFT, "--ds.param_offload nvme --ds.zero_stage 3",
     "--ds.param_offload nvme needs --ds.nvme_path"),
    (SFT, "--ds.nvme_path /drive", "--ds.nvme_path /drive needs --ds.zero_stage 3"),
    (SFT, "--ds.nvme_path drive --ds.zero_stage 3",
     "--ds.nvme_path drive must be an absolute path"),
    (SFT, "--ckpt.max_num 0 --ckpt.save_steps 5",
     "--ckpt.max_num 0 deletes the checkpoints of --ckpt.save_steps 5"),
    (RL, "--ckpt.max_num -1", "--ckpt.max_num is -1, but it must be at least 0"),
    (SFT, "--ds.zpg 2 --ds.zero_stage 3", "--ds.zpg 2 does not divide the 1 rank(s)"),
    (RL, "--ds.zpg 2 --ds.zero_stage 3 --actor.num_gpus_per_node 3",
     "--ds.zpg 2 does not divide the 3 rank(s) (--actor.num_nodes 1 x"),
    (RL, "--ds.zpg 2 --ds.zero_stage 3 --ds.tensor_parallel_size 2",
     "--ds.zpg 2 cannot be combined with --ds.tensor_parallel_size 2"),
    (SFT, "--optim muon --ds.use_universal_ckpt --ckpt.load_enable",
     "--optim muon: --ds.use_universal_ckpt converts only the state of adam"),
    (SFT, "--optim adam_8bit --ds.use_universal_ckpt --ckpt.load_enable",
     "--optim adam_8bit: --ds.use_universal_ckpt converts only the state of adam"),
    (RL, "--ds.enable_sleep --ds.zero_stage 0",
     "--ds.enable_sleep needs --ds.zero_stage 1, 2 or 3"),
    (RL, "--reward.verifier math --reward.remote_url http://host,r.py",
     "--reward.remote_url http://host,r.py combined with --reward.verifier math is not available "
     "yet: leave out one"),
    (SFT, "--ds.param_dtype fp16", "--ds.param_dtype fp16 is not available yet: use bf16"),
    (RL, "--ds.param_dtype fp16", "--ds.param_dtype fp16 is not available yet: use bf16"),
    (RL, "--vllm.quantization awq",
     "--vllm.quantization awq is not supported for published weights on this machine"),
    (RL, "--vllm.quantization fp8_per_channel --vllm.dtype fp32",
     "quantizes 16-bit weights and cannot be combined with --vllm.dtype fp32"),
    (RL, "--vllm.quantization fp8", "on this machine: use fp8_per_channel."),
    (RL, '--vllm.engine_args {"enable_chunked_prefill":true}',
     "CPUs cannot combine chunked prefill with seeded samples"),
    (RL, '--vllm.engine_args {"max_num_batched_tokens":512}',
     "set max_num_batched_tokens to at least --data.max_len 2048"),
    (RL, "--train.colocate_actor_ref --ref.num_gpus_per_node 2",
     "--train.colocate_actor_ref requires equal sizes"),
    (RL,
     "--train.colocate_critic_reward --reward.model_name_or_path o/r --critic.num_gpus_per_node 2 "
     "--reward.num_gpus_per_node 1 --algo.advantage.estimator gae",
     "--train.colocate_critic_reward requires equal"),
    (SFT, "--ds.lora.rank 8 --ds.lora.target_modules",
     "--ds.lora.target_modules is empty: leave it out"),
    (SFT, "--ds.lora.rank 8 --ds.lora.dora --ds.zero_stage 3",
     "--ds.lora.dora needs full weights, but with --ds.zero_stage 3"),
    (SFT, "--ds.tensor_parallel_size 2 --ds.lora.rank 8 --ds.load_in_4bit",
     "--ds.tensor_parallel_size 2 cannot split 4-bit weights"),
    (SFT, "--ds.tensor_parallel_size 2 --ds.lora.rank 8 --ds.lora.dora",
     "--ds.tensor_parallel_size 2 cannot split the magnitudes of --ds.lora.dora"),
    (RL, "--ds.ring_attn_size 2 --actor.num_gpus_per_node 3",
     "--actor.num_gpus_per_node 3 is not a multiple of the 2 ranks that work on the same rows"),
    (SFT, "--ds.load_in_4bit",
     "--ds.load_in_4bit freezes the model's weights: train adapters with --ds.lora.rank"),
    (RL, "--ds.lora.rank 8 --ds.lora.publish adapter --ds.lora.dora",
     "cannot apply DoRA adapters (--ds.lora.dora)"),
    (RL, "--ds.lora.rank 8 --ds.lora.publish adapter --ds.load_in_4bit",
     "the adapter is trained on 4-bit weights (--ds.load_in_4bit)"),
    (RL, "--ds.lora.rank 8 --ds.lora.publish adapter --vllm.pipeline_parallel_size 2",
     "the pipeline stages of an engine do not report which layers they adapt: use merged"),
    (RL, "--ds.lora.rank 513 --ds.lora.publish adapter",
     "--ds.lora.rank 513 is above 512, the maximum"),
    ("serve_rm", "--ds.load_in_4bit --ds.param_dtype fp16",
     "--ds.param_dtype fp16 cannot be combined with --ds.load_in_4bit"),
    (SFT, "--eval.patience 3",
     "--eval.patience 3 requires --eval.dataset, which is not set"),
    (SFT, "--eval.patience 3 --eval.dataset e --ckpt.best_metric_key none",
     "--ckpt.best_metric_key, which is none"),
    (SFT, "--eval.patience 3 --eval.dataset e --ckpt.disable_ds",
     "--ckpt.disable_ds does not write"),
    (SFT, "--eval.patience 0 --eval.dataset e", "--eval.patience is 0, but it must be at least 1"),
    (RL, "--eval.patience 3 --eval.dataset e --eval.at_start",
     "--eval.patience 3 requires evaluations during training: set --eval.steps"),
    (SFT, "--data.dataset a,b --data.dataset_probs 1.0", "1.0 must be 2 positive number(s)"),
    (RL, "--data.prompt_dataset a,b --data.prompt_probs 0.5,0.6", "must be 2 positive number(s)"),
    (RL, "--data.prompt_dataset a,b --data.prompt_probs 1.5,-0.5", "must be 2 positive"),
    (RL, "--data.prompt_probs half", "--data.prompt_probs half must be 1 positive number(s)"),
    (SFT, "--data.dataset_probs half",
     "--data.dataset_probs half must be 1 positive number(s)"),
    (SFT, "--data.dataset a,b --data.dataset_probs 0.5,0.6",
     "--data.dataset_probs 0.5,0.6 must be 2 positive"),
    (RL, "--data.prompt_dataset a,b --data.prompt_probs 1", "1 must be 2 positive"),
    (RL, "--algo.ptx.dataset d --algo.ptx.probs half", "--algo.ptx.probs half must be 1 positive"),
    (RL, "--algo.ptx.dataset d --algo.ptx.probs 0.5,0.5", "0.5,0.5 must be 1 positive"),
    (RL, "--algo.ptx.dataset d --algo.ptx.probs 0.5",
     "--algo.ptx.probs 0.5 must be 1 positive"),
    (RL, "--actor.eps_clip 0", "--actor.eps_clip is 0.0, but it must be above 0"),
    (RL, "--actor.dual_clip 1", "--actor.dual_clip is 1.0, but it must be above 1"),
    (RL, "--algo.advantage.gamma 1.1", "--algo.advantage.gamma is 1.1"),
    (RL, "--algo.advantage.lambd -0.1", "it must be at least 0 and at most 1"),
    (RL, "--rollout.top_p 0", "--rollout.top_p is 0.0"),
    (RL, "--rollout.temperature -1", "--rollout.temperature is -1.0"),
    (RL, "--reward.stop_properly_penalty_coef 1.5", "it must be at most 1"),
    (RL, "--reward.overlong_buffer_len 0", "--reward.overlong_buffer_len is 0.0"),
    (RL, "--train.async_queue_size 0", "--train.async_queue_size is 0"),
    (RL, "--actor.adam.betas 0.9 1", "--actor.adam.betas is 1.0"),
    (RL, "--actor.adam.lr nan", "--actor.adam.lr is nan"),
    (SFT, "--ds.zero_stage 4", "--ds.zero_stage is 4"),
    (SFT, "--train.batch_size 0", "--train.batch_size is 0"),
    (RL, "--train.batch_size 0", "--train.batch_size is 0"),
    (RL, "--actor.num_gpus_per_node 0", "--actor.num_gpus_per_node is 0"),
    (RL, "--train.micro_batch_size 0", "--train.micro_batch_size is 0"),
    (RL, "--rollout.micro_batch_size 0", "--rollout.micro_batch_size is 0"),
    (RL, "--ds.tensor_parallel_size 0", "--ds.tensor_parallel_size is 0"),
    (SFT, "--ds.ring_attn_size 0", "--ds.ring_attn_size is 0"),
    (SFT, "--logger.logging_steps 0", "--logger.logging_steps is 0"),
    ("serve_rm", "--reward.model_name_or_path ./gone",
     "--reward.model_name_or_path ./gone does not exist"),
    ("serve_rm", "--max_batch_tokens 100 --data.max_len 200",
     "100 is too small for a text of --data.max_len 200"),
    ("serve_rm", "--port 70000", "--port is 70000, but it must be at least 0 and at most 65535"),
    ("serve_rm", "--batch_size 0", "--batch_size is 0"),
]  # fmt: skip


def unchecked(command: str, line: str, gpu_machine: Any) -> Any:
    """Return the resolved configuration of a minimal command line with `line` appended.

    The rules are not checked.
    """
    if "flash_attention_2" in line:  # these rules apply only to machines with a GPU
        gpu_machine(1, flash_attention="fp32" in line)
    smallest = SMALLEST[command] if line else ""
    if "--reward.remote_url" in line:  # two reward sources would be rejected
        smallest = smallest.replace("--reward.verifier math", "")
    return resolved(command, f"{smallest} {line}")


def resolved(command: str, line: str) -> Any:
    """Return the resolved configuration of a command line without checking its rules."""
    machine.cluster_gpus = None  # an earlier command line may have declared a cluster
    given, _ = read_flags(COMMANDS[command], line.split(), command=command)
    return amend(COMMANDS[command](), {**given, "given": given}).resolve(command=command)[0]


@pytest.mark.parametrize(("command", "line", "sentence"), BROKEN)
def test_broken_rule_names_the_flag_and_the_value(
    command: str, line: str, sentence: str, gpu_machine: Any
) -> None:
    config = unchecked(command, line, gpu_machine)
    found = [*value_violations(config), *spelled_out(config, config.violations())]
    assert [text for text in found if sentence in text], found
    assert not [text for text in found if re.search(r"<\w+\.", text)], "a flag without its value"


REWARD_TEST, BATCH, CHAT = "reward_test", "batch_inference", "interactive_chat"
AGENT = f"--train.agent_func_path {__file__}"
WIN_RATE = "--task win_rate"
# Full command lines that break other rules or print a notice, with the expected text.
WHOLE_LINES: list[tuple[str, str, str]] = [
    ("eval", "", "The samples have no reward: set --reward.remote_url"),
    ("eval", "", "--model.model_name_or_path is required"),
    ("eval", "--model.model_name_or_path tests/none",
     "--model.model_name_or_path tests/none is loaded from the Hub"),
    (SFT, "--optim muon", "--muon.lr 0.02 is the default, a rate for training from scratch"),
    (RL, "--actor.optim muon", "--actor.muon.lr 0.02 is the default"),
    (RL, "--rollout.batch_size 8", "To step after every 8 prompts, set --train.batch_size 8."),
    (RL, "--critic.optim muon --algo.advantage.estimator gae",
     "--critic.muon.lr 0.02 is the default"),
    (SFT, "--optim adam_8bit", "--optim adam_8bit needs the package bitsandbytes"),
    (RL, "--critic.optim adam_8bit --algo.advantage.estimator gae",
     "--critic.optim adam_8bit needs the package bitsandbytes"),
    (SFT, "--ds.load_in_4bit --ds.lora.rank 8",
     "--ds.load_in_4bit needs the package bitsandbytes"),
    ("eval", "--judge.url localhost", "--judge.url localhost is not an http(s) URL"),
    ("eval", "--ds.param_dtype fp16", "--ds.param_dtype fp16 is not supported by engines"),
    ("eval", "--task rm_accuracy",
     "--task rm_accuracy evaluates reward models: set --reward.model_name_or_path"),
    ("eval", WIN_RATE, "--task win_rate compares the answers with those of one other source"),
    ("eval", WIN_RATE,
     "--task win_rate needs one way to decide which answer is better"),
    ("eval", f"{WIN_RATE} --against.model_name_or_path m --against.answer_key k",
     "set either --against.model_name_or_path, or"),
    ("eval", f"{WIN_RATE} --judge.url http://h/v1 --reward.verifier math",
     "set either --judge.url, or one or more rewards"),
    ("eval", f"{WIN_RATE} {AGENT} --against.answer_key k",
     "--against.answer_key k is a column of answers that the agent cannot reward"),
    ("eval", f"{WIN_RATE} --judge.url http://h/v1 --reward.on_error 0",
     "--reward.on_error 0 sets a reward, but --judge.url"),
    ("eval", f"{WIN_RATE} --judge.url http://h/v1",
     "--judge.url http://h/v1 may serve several models: choose one with --judge.model"),
    (BATCH, "--output_path .", "--output_path . is a folder"),
    (BATCH, "--post_processor csft --reward_template {input}",
     "--reward_template {input} needs both {input} and {reward}"),
    (BATCH, "--reward.process_model p",
     "--reward.process_model p can only score answers during sampling"),
    (BATCH, "--task rm", "--task rm needs a reward model: set --reward.model_name_or_path"),
    (CHAT, "--data.input_template Q:", "--data.input_template Q: has no {} placeholder"),
    (CHAT, "--preamble gone.txt", "--preamble gone.txt is not a file on this machine"),
    ("pipeline", "--file gone.yaml", "--file gone.yaml is not a file on this machine"),
    (REWARD_TEST, "",
     "There is no reward to test: set --reward.remote_url (a .py file or a URL) or "
     "--reward.verifier"),
    (REWARD_TEST, "", "set the response column with --data.output_key"),
    ("train_dpo", "--model.ipo_enable --model.loss_type hinge",
     "--model.ipo_enable (--model.loss_type ipo) and --model.loss_type hinge"),
    (SFT, "--data.input_template Q:", "--data.input_template 'Q:' is ignored: it has no {}"),
    (SFT, r"--data.input_template {}\nA:", "--data.input_template contains a backslash"),
    (SFT, "", "--ds.param_dtype bf16 is 5 to 20 times slower than --ds.param_dtype fp32"),
    (SFT, "--ds.attn_implementation flash_attention_2",
     "Using --ds.attn_implementation sdpa instead of flash_attention_2"),
    (SFT, "--ckpt.save_steps 5 --ckpt.disable_ds",
     "--ckpt.save_steps saves nothing: --ckpt.disable_ds is on"),
    (SFT, "--ckpt.save_steps 5 --ckpt.path EARLIER", "has checkpoints from an earlier run"),
    (SFT, "--data.dataset d --eval.dataset d",
     "--eval.dataset d is the training data (--data.dataset)"),
    (SFT, "--train.batch_size 4",
     "--train.micro_batch_size is 4, each rank's share of --train.batch_size 4"),
    ("serve_rm", "--host 0.0.0.0", "--host 0.0.0.0: anyone who can reach this address"),
    (RL, "", "There is no GPU, so the default is 1 for --actor.num_gpus_per_node"),
    (RL, "", "Each iteration: 1024 prompts x 1 = 1024 samples"),
    (RL, "--train.dynamic_batch_enable",
     "--train.dynamic_batch_enable turns on --ds.packing_samples"),
    (SFT, "--ds.ring_attn_size 2 --ds.tensor_parallel_size 3",
     "the 6 ranks that work on the same rows (--ds.ring_attn_size 2 x --ds.tensor_parallel_size "
     "3): start a multiple of 6 processes"),
    (RL, "--actor.eps_clip 0.1 --actor.eps_clip_low_high 0.2 0.2",
     "--actor.eps_clip has no effect with"),
    (RL, "--actor.policy_loss_type gspo",
     "With gspo, --actor.eps_clip_low_high 0.2 0.2 almost never clips"),
    (RL, "--algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode clip",
     "is_correction_mode clip with --algo.advantage.is_correction_level seq weights"),
    (RL, "--algo.kl.use_loss", "--algo.kl.estimator k1 has a zero expected gradient as a loss"),
    (RL, "--algo.kl.estimator k3", "--algo.kl.estimator k3 is meant for --algo.kl.use_loss"),
    (RL, "--algo.kl.stop_update 1 --train.batch_size 1024", "--algo.kl.stop_update has no effect"),
    (RL, "--algo.distill.teacher t", "--algo.distill.teacher is the only training signal"),
    (RL, "--reward.remote_url r.py", "--data.label_key is not set"),
    (RL, "--vllm.hang_timeout 5 --train.publish_timeout 9",
     "--vllm.hang_timeout 5 is less than --train.publish_timeout 9"),
    (RL, "--train.async_enable --train.async_queue_size 2 --train.max_staleness 1",
     "With --train.max_staleness 1, the queue (--train.async_queue_size 2) can never fill up"),
    (RL, "--rollout.top_p 0.5",
     "--rollout.top_p 0.5 and --rollout.top_k -1: the engine's log-probabilities"),
    (RL, "--eval.dataset e", "--eval.dataset is never used: set --eval.steps or --eval.at_start"),
]  # fmt: skip


@dataclass(frozen=True)
class Yield:
    """The `yield` of a message in a rule or a notice."""

    file: str
    lines: range
    text: str


def sentences() -> list[Yield]:
    """Return every message that the rules and notices of `config` may yield."""
    found: list[Yield] = []
    for module in package().values():
        if module.room != "config":
            continue
        for function in ast.walk(module.tree):
            if not isinstance(function, ast.FunctionDef) or not RULE.fullmatch(function.name):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Yield) and node.value:
                    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                    found.append(Yield(str(module.path), lines, ast.unparse(node.value)))
    return found


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Simulate a CPU without AVX-512, and hide the bitsandbytes package.

    Returns a folder with checkpoints from an earlier run.
    """
    installed = machine.installed
    monkeypatch.setattr(machine, "has_quick_bfloat16", lambda: False)
    monkeypatch.setattr(
        machine, "installed", lambda name: None if name == "bitsandbytes" else installed(name)
    )
    (tmp_path / "global_step5.manifest.json").touch()
    return tmp_path


@pytest.mark.parametrize(("command", "line", "sentence"), WHOLE_LINES)
def test_full_command_line_gets_the_expected_error_or_notice(
    command: str, line: str, sentence: str, slow_machine: Path
) -> None:
    config = resolved(command, line.replace("EARLIER", str(slow_machine)))
    found = spelled_out(config, [*config.violations(), *config.notices()])
    assert [text for text in found if sentence in text], found


def test_every_rule_is_covered_by_a_command_line_that_breaks_it(
    gpu_machine: Any, slow_machine: Path
) -> None:
    """Notices must be covered too, and no message may name a flag that the command lacks."""
    run: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not RULE.fullmatch(frame.f_code.co_name):
            return None
        run.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    def ask(config: Any) -> None:
        sys.settrace(trace)
        texts = [*value_violations(config), *config.violations(), *config.notices()]
        sys.settrace(before)
        found = spelled_out(config, texts)
        assert not [text for text in found if re.search(r"<[a-z]\w*(\.\w+)*>", text)], found

    before = sys.gettrace()
    for command, line, _ in BROKEN:
        ask(unchecked(command, line, gpu_machine))
        gpu_machine(0, flash_attention=False)
    for command, line, _ in WHOLE_LINES:
        ask(resolved(command, line.replace("EARLIER", str(slow_machine))))
    rules = sentences()
    assert len(rules) > 100
    unseen = [each for each in rules if not any((each.file, line) in run for line in each.lines)]
    assert [each.text for each in unseen] == []


@pytest.mark.parametrize("sentence", sentences(), ids=lambda each: f"{each.file}:{each.lines[0]}")
def test_messages_name_only_flags_that_the_command_has(sentence: Yield) -> None:
    named = re.findall(r"<([a-z]\w*(?:\.\w+)*)>", sentence.text)
    known = {path for root in COMMANDS.values() for path in flags_of(root)}
    assert [name for name in named if name not in known] == []


def test_all_broken_rules_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ppo(
            "--algo.advantage.estimator rloo --rollout.temperature 0 --ds.param_dtype fp16 "
            "--rollout.max_new_tokens 4096 --vllm.num_engines 0 --algo.advantage.lambd 2"
        )
    assert len(caught.value.violations) == 6
    for flag in ("rloo", "temperature", "fp16", "max_new_tokens", "num_engines", "lambd"):
        assert flag in str(caught.value)


@pytest.mark.parametrize("command", ROOTS)
def test_command_without_flags_reports_its_required_model(command: str) -> None:
    config, _ = ROOTS[command]().resolve(command=command)
    text = "\n".join(config.check())
    model = {RL: "--actor", "serve_rm": "--reward"}.get(command, "--model")
    assert f"{model}.model_name_or_path is required" in text


@pytest.mark.parametrize(
    "line",
    [
        "--algo.advantage.estimator reinforce",
        "--algo.advantage.estimator dr_grpo --rollout.n_samples_per_prompt 2",
        "--algo.kl.init_coef 0 --train.colocate_actor_ref --ref.num_gpus_per_node 2",
        (
            "--train.colocate_all --actor.num_gpus_per_node 4 --vllm.num_engines 2 "
            "--vllm.tensor_parallel_size 2"
        ),
        "--train.dynamic_batch_enable --train.micro_batch_size 48",
        (
            "--train.dynamic_batch_enable --train.max_tokens_per_gpu 100 "
            "--rollout.max_tokens_per_gpu 50"
        ),
        "--actor.num_nodes 2 --actor.num_gpus_per_node 4 --train.micro_batch_size 4",
        "--rollout.max_new_tokens 64 --reward.overlong_buffer_len 64",
        "--eval.temperature 0 --reward.on_error -0.5",
        "--data.prompt_dataset a,b --data.prompt_probs 0.25,0.75",
        "--data.prompt_dataset a,b,c --data.prompt_probs 0.333,0.333,0.333",
        "--data.prompt_dataset owner/name@data/dir",
        "--actor.model_name_or_path owner/name",
        '--vllm.engine_args {"max_num_seqs":64,"block_size":64,"max_num_batched_tokens":4096}',
        '--vllm.engine_args {"speculative_config":{"method":"ngram","num_speculative_tokens":3}}',
        (
            "--rollout.seeded off --vllm.engine_args "
            '{"enable_chunked_prefill":true,"max_num_batched_tokens":512}'
        ),
    ],
)
def test_valid_combinations_pass(line: str) -> None:
    assert violations(RL, line) == []


def test_existing_reward_file_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward_func(queries, prompts, labels): ...\n")
    config = ppo(f"--reward.remote_url {file}")
    assert config.reward.function_path == str(file)
    assert config.reward.urls == []


def test_whitespace_around_reward_urls_is_stripped() -> None:
    config = amend(PPOConfig(), {"reward.remote_url": " http://a/x , http://b/y "})
    assert config.reward.urls == ["http://a/x", "http://b/y"]


def test_existing_models_and_datasets_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    line = f"--model.model_name_or_path {tmp_path} --data.dataset {tmp_path}/rows.jsonl"
    assert sft(line).data.dataset == f"{tmp_path}/rows.jsonl"


def test_existing_dataset_may_contain_an_at_sign(tmp_path: Path) -> None:
    rows = tmp_path / "data@2024/rows@v2.jsonl"
    rows.parent.mkdir()
    rows.write_text("{}\n")
    assert violations(SFT, f"--data.dataset {rows}") == []
    assert violations(SFT, f"--data.dataset {tmp_path}/gone.jsonl@folder") == [
        f"--data.dataset {tmp_path}/gone.jsonl does not exist on this machine or is not readable "
        "by this user."
    ]


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder that this user cannot read, even if the user is root."""
    folder, stat, access = tmp_path / "locked", os.stat, os.access
    folder.mkdir()

    def denied(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{folder}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", denied)
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: not str(path).startswith(str(folder)) and access(path, mode),
    )
    return folder


def test_error_names_paths_that_cannot_be_read(locked: Path) -> None:
    assert violations(SFT, f"--model.model_name_or_path {locked}/m --data.dataset {locked}") == [
        (
            f"--model.model_name_or_path {locked}/m does not exist on this machine or is not "
            "readable by this user."
        ),
        f"--data.dataset {locked} does not exist on this machine or is not readable by this user.",
    ]
    (sentence,) = violations(RL, f"--rollout.replay_dir {locked}/episodes")
    assert "is not a folder on this machine" in sentence
    (sentence,) = violations(RL, f"--reward.remote_url {locked}/r.py")
    assert f"--reward.remote_url {locked}/r.py must be" in sentence
    with pytest.raises(ConfigError, match="is not a file on this machine"):
        parse_config(PipelineConfig, ["--file", f"{locked}/p.yaml"], command="pipeline")


def test_configuration_file_may_name_an_unreadable_output_folder(
    locked: Path, tmp_path: Path
) -> None:
    """`check_folders` later reports that the folder cannot be written."""
    file = tmp_path / "run.yaml"
    file.write_text(f"ckpt.output_dir: {locked}/model")
    assert sft(f"--config {file}").ckpt.output_dir == f"{locked}/model"


def test_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(b"\x0a\x8a")
    (sentence,) = violations(SFT, f"--data.tokenizer_chat_template {file}")
    assert sentence.startswith(
        f"--data.tokenizer_chat_template {file} cannot be read as a UTF-8 text file: "
    )


def test_batch_size_is_checked_against_the_number_of_launched_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    (sentence,) = violations(SFT, "")
    assert "not divisible by the 3 data-parallel ranks (the launcher started 3)" in sentence
    assert "use 126 or 129." in sentence
    monkeypatch.setenv("WORLD_SIZE", "512")
    (sentence,) = violations(SFT, "")
    assert sentence.endswith("use 512.")


@pytest.mark.parametrize("flag", ["--ds.ring_attn_size", "--ds.tensor_parallel_size"])
def test_launched_processes_must_be_a_multiple_of_the_ranks_that_share_rows(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    parse(SFT, f"{flag} 2")
    (sentence,) = violations(SFT, f"{flag} 3")
    assert "number of processes, 4, is not a multiple of the 3 ranks" in sentence
    assert named_flags(sentence) == [f"{flag} 3"]


def named_flags(sentence: str) -> list[str]:
    """Return the parallelism flags that a sentence names, with their values."""
    return re.findall(r"--ds\.(?:ring_attn|tensor_parallel)_size \d+", sentence)


def test_ranks_that_share_rows_need_a_launcher_except_in_a_dry_run_or_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (sentence,) = violations(SFT, "--ds.ring_attn_size 2")
    assert "torchrun --nproc_per_node 2" in sentence
    assert named_flags(sentence) == ["--ds.ring_attn_size 2"]
    config = parse(SFT, "--ds.ring_attn_size 2 --dry_run")
    assert sentence in config.notices()
    monkeypatch.setattr(machine, "only_plans", True)
    parse(SFT, "--ds.ring_attn_size 2")


@pytest.mark.parametrize("flags", ["--optim adam_8bit", "--ds.load_in_4bit --ds.lora.rank 8"])
def test_outdated_bitsandbytes_is_refused_except_in_a_plan(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = SimpleNamespace(version="0.50.0")
    monkeypatch.setattr(machine, "installed", lambda name: package)
    parse(SFT, flags)
    package.version = "0.49.2"
    (sentence,) = violations(SFT, flags)
    assert flags.split(" --")[0] in sentence
    assert "bitsandbytes >=0.50, but 0.49.2" in sentence and "'.[qlora]'" in sentence
    monkeypatch.setattr(machine, "only_plans", True)
    parse(SFT, flags)


def test_supported_bitsandbytes_versions_match_the_version_range_of_the_extra() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = f"bitsandbytes{training_rules.BITSANDBYTES}"
    assert project["optional-dependencies"]["qlora"] == [extra]


@pytest.mark.parametrize("command", [SFT, "train_dpo", RL])
@pytest.mark.parametrize(
    ("flags", "is_noticed"),
    [
        ("--eval.dataset d --eval.split train", True),
        ("--eval.dataset d --eval.split test", False),
        ("--eval.dataset e --eval.split train", False),
        ("", False),
    ],
)
def test_evaluation_on_the_training_data_gets_a_notice(
    command: str, flags: str, is_noticed: bool
) -> None:
    config = parse(command, flags)
    about = [
        sentence
        for sentence in spelled_out(config, config.notices())
        if "--eval.dataset d" in sentence
    ]
    assert bool(about) == is_noticed


def test_evaluation_on_the_training_file_gets_a_notice_for_any_split_name(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    config = parse(SFT, f"--data.dataset {file} --eval.dataset {file} --eval.split test")
    assert any(str(file) in sentence for sentence in spelled_out(config, config.notices()))


def test_messages_about_rewards_name_the_process_reward_model() -> None:
    weights = "--reward.process_model o/p --reward.weights 1 1 1"
    found = violations("train_ppo_ray", weights)
    [sentence] = [text for text in found if "--reward.weights 1 1 1 has" in text]
    assert "2 rewards" in sentence and "--reward.process_model" in sentence
    assert "--reward.process_model" in sampling_rules.NOTHING_REWARDS


@pytest.mark.parametrize(
    "line",
    [
        "--train.colocate_all --actor.num_gpus_per_node 4 --reward.model_name_or_path o/r "
        "--reward.num_gpus_per_node 2",
        "--ds.ring_attn_size 2 --actor.num_gpus_per_node 3 --ref.num_gpus_per_node 3",
    ],
)
def test_processes_of_models_that_are_not_loaded_are_not_checked(line: str) -> None:
    assert violations(RL, line) != []
    assert violations(RL, f"--rollout.only {line}") == []
