"""SFT, DPO, LoRA and GRPO runs with tiny random models of many architectures.

The results are written to a page that shows which architecture works with which command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.commands import as_arguments, column, finish, launch, small_grpo, write_rows
from tests.e2e.test_offline_family import flags_of, make_workspace
from tests.tiny import EXPERTS, HEADS, SIZES, character_tokenizer, unbalance
from tests.verify.own_code.configuration_baichuan import BaichuanConfig
from tests.verify.own_code.modeling_baichuan import BaichuanForCausalLM
from tests.verify.results import write_result

pytestmark = pytest.mark.verify

# Settings that an architecture needs besides the common sizes, keyed by Transformers name.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "phi": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS | {"head_dim": 32},
    "baichuan": {"num_key_value_heads": HEADS["num_attention_heads"]},
}
OWN_CODE = "baichuan"  # has its code in the model's folder and needs --model.trust_remote_code
WAYS = ("SFT", "DPO", "SFT with LoRA", "GRPO", "GRPO, bf16")
EXACT = 1e-4  # mean difference between engine and trainer log-probabilities in float32, in nats


def save(folder: Path, kind: str, changes: dict[str, Any]) -> Path:
    """Save a random float32 model with this architecture, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    sizes = SIZES | HEADS | {"vocab_size": len(tokenizer)} | changes
    if kind == OWN_CODE:
        BaichuanConfig.register_for_auto_class()
        BaichuanForCausalLM.register_for_auto_class("AutoModelForCausalLM")
        hf: Any = BaichuanForCausalLM(BaichuanConfig(**sizes))
    else:
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float()
    unbalance(hf)
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind == OWN_CODE:  # vLLM loads only the decoder from the folder
        stored = json.loads((folder / "config.json").read_text())
        stored["auto_map"]["AutoModel"] = "modeling_baichuan.BaichuanModel"
        (folder / "config.json").write_text(json.dumps(stored))
    return folder


def outcome(way: str, model: Path, workspace: Path, folder: Path) -> str:
    """Return the result of a short run.

    The result is `yes`, the gap between engine and trainer, or the reason for rejecting the model.
    """
    if way.startswith("GRPO"):
        command, dtype = "train_ppo_ray", "bf16" if "bf16" in way else "fp32"
        flags = small_grpo(workspace, folder, prompts=4, samples=4) | {
            "actor.model_name_or_path": model,
            "reward.remote_url": Path(__file__).parent.parent
            / "e2e"
            / "reward_files"
            / "letters.py",
            "ds.param_dtype": dtype,
        }
    else:
        command = "train_dpo" if way == "DPO" else "train_sft"
        changes = {
            "model.model_name_or_path": model,
            "eval.dataset": None,
            "eval.split": None,
            "eval.steps": None,
        }
        flags = flags_of("dpo" if way == "DPO" else "kd", workspace, folder, **changes)
        for name in [name for name in flags if name.startswith("kd.")] if way != "DPO" else []:
            flags[name] = None
        flags |= {"ds.lora.rank": 4} if "LoRA" in way else {}
    if model.name == OWN_CODE:
        flags["model.trust_remote_code"] = True
    done = finish(launch(command, flags), timeout=400)
    if done.status == 2:
        return "refused: " + done.errors.partition("error: ")[2].strip().splitlines()[0].replace(
            "|", "\\|"
        )
    assert done.status == 0, (
        f"{way}, {model.name}, {as_arguments(flags)}:\n{done.printed}\n{done.errors}"
    )
    if not way.startswith("GRPO"):
        return "yes"
    gap = max(column(folder, "train/logprob_gap_mean"))
    assert "bf16" in way or gap < EXACT, f"{model.name}: gap {gap}"
    return f"{gap:.0e}"


@pytest.mark.timeout(3600)
def test_every_architecture_trains_with_each_command_or_is_rejected_with_a_reason(
    tmp_path: Path,
) -> None:
    workspace, table = make_workspace(tmp_path), []
    write_rows(
        workspace / "prompts.jsonl",
        [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(4) for b in range(4)],
    )
    for kind, changes in ARCHITECTURES.items():
        model = save(workspace / kind, kind, changes)
        cells = []
        for number, way in enumerate(WAYS):
            cells.append(outcome(way, model, workspace, tmp_path / f"{kind}-{number}"))
            print(kind, way, cells[-1], flush=True)
        table.append([f"`{kind}`", *cells])
        write_result(
            "architectures",
            "Architectures",
            "python -m pytest -m verify tests/verify/test_architectures.py",
            ["model_type", *WAYS],
            table,
            "Random models with 2 layers. `baichuan` is a local folder that contains its own code, "
            "has one weight for queries, keys and values, and requires "
            "`--model.trust_remote_code`. For GRPO, the table shows the largest mean difference "
            "of any step between the engine's and the trainer's log-probabilities of the sampled "
            "tokens, in nats.",
        )
