"""Commands copied verbatim from published pages about the project.

Each entry lists the errors that the printed command causes, and the flags that fix them.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

SUBMIT = 'ray job submit --address="http://127.0.0.1:8265" '
FROM_HERE = '--runtime-env-json=\'{"working_dir": "."}\' '
PPO = (
    "-- python3 -m openrlhf.cli.train_ppo_ray "
    "--actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture "
    "--reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-700k"
)
NO_PROMPTS = "--data.prompt_dataset is required."
NO_REWARD = "The samples have no reward: set --reward.remote_url"
NO_GROUPS = (
    "--algo.advantage.estimator group_norm compares the samples of a prompt, but "
    "--rollout.n_samples_per_prompt is 1."
)


@dataclass(frozen=True, kw_only=True)
class Printed:
    """A printed command.

    `lacks` holds the beginning of each error, one per flag in `missing`; `not_yet` lists the
    unsupported features.
    """

    text: str
    lacks: tuple[str, ...] = ()
    missing: str = ""
    not_yet: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Return the command's name."""
        return self._split[0]

    @property
    def words(self) -> list[str]:
        """Return the command's flags, split as a shell would."""
        return self._split[1]

    @property
    def _split(self) -> tuple[str, list[str]]:
        words = shlex.split(self.text)
        start = next(index for index, word in enumerate(words) if word.startswith("openrlhf.cli."))
        return words[start].removeprefix("openrlhf.cli."), words[start + 1 :]


PRINTED = {
    "PPO as a job, from this folder": Printed(
        text=f"{SUBMIT}{FROM_HERE}{PPO} --ckpt.output_dir ./checkpoint/llama3-8b-ppo",
        lacks=(NO_PROMPTS,),
        missing="--data.prompt_dataset prompts",
    ),
    "PPO as a job": Printed(
        text=f"{SUBMIT}{PPO}", lacks=(NO_PROMPTS,), missing="--data.prompt_dataset prompts"
    ),
    "GRPO instead of PPO": Printed(
        text=f"{SUBMIT}{PPO} --algo.advantage.estimator group_norm",
        lacks=(NO_PROMPTS, NO_GROUPS),
        missing="--data.prompt_dataset prompts --rollout.n_samples_per_prompt 2",
    ),
    "SFT": Printed(
        text="deepspeed --module openrlhf.cli.train_sft "
        "--actor.model_name_or_path meta-llama/Meta-Llama-3-8B --data.dataset OpenRLHF/sft-mixture"
    ),
    "RM": Printed(
        text="deepspeed --module openrlhf.cli.train_rm "
        "--actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture "
        "--data.dataset OpenRLHF/preference_dataset_mixture2 "
        "--ckpt.output_dir ./checkpoint/llama3-8b-rm"
    ),
    "asynchronous PPO": Printed(
        text=f"{SUBMIT}{FROM_HERE}-- python3 -m openrlhf.cli.train_ppo_ray "
        "--actor.model_name_or_path '<model>' --reward.model_name_or_path '<rm>' "
        "--train.async_enable --train.async_queue_size 2 --train.partial_rollout_enable",
        lacks=(NO_PROMPTS,),
        missing="--data.prompt_dataset prompts",
    ),
    "asynchronous GRPO": Printed(
        text=f"{SUBMIT}-- python3 -m openrlhf.cli.train_ppo_ray "
        "--actor.model_name_or_path '<model>' --algo.advantage.estimator group_norm "
        "--train.async_enable --train.async_queue_size 2",
        lacks=(NO_PROMPTS, NO_REWARD, NO_GROUPS),
        missing=(
            "--data.prompt_dataset prompts --reward.verifier format "
            "--rollout.n_samples_per_prompt 2"
        ),
    ),
    "DPO": Printed(
        text="deepspeed --module openrlhf.cli.train_dpo "
        "--actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture "
        "--data.dataset OpenRLHF/preference_dataset_mixture2"
    ),
}
