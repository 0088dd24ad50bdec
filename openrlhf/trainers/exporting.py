"""Models that an RL run exports for Transformers and vLLM."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf.cluster.worker_group import Call, WorkerGroup, wait_for
from openrlhf.config.learning import RLFlags
from openrlhf.observability.recorder import Recorder
from openrlhf.workers.base import TrainedWorker


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """Exports the policy and, if requested by the flags, the critic."""

    policy: WorkerGroup
    critic: WorkerGroup | None
    tokenizer: PreTrainedTokenizerBase
    recorder: Recorder
    config: RLFlags

    def write_result(self) -> None:
        """Write the trained models to --ckpt.output_dir at the end of the run."""
        folder = Path(self.config.ckpt.output_dir).absolute()
        self.write_policy(str(folder), final=True)
        self.recorder.display.note(f"model: {folder}")
        if self.critic and self.config.critic.save_value_network:
            calls = self.critic.broadcast(TrainedWorker.export, self.tokenizer, f"{folder}_critic")
            self._wait(calls, "export the critic")

    def write_policy(self, path: str, *, final: bool) -> None:
        """Write the policy to `path`. `final` marks the last export of the run."""
        calls = self.policy.broadcast(TrainedWorker.export, self.tokenizer, path, final)
        self._wait(calls, "export the policy")

    def _wait(self, calls: list[Call], doing: str) -> None:
        wait_for(calls, timeout_s=self.config.train.step_timeout, doing=doing)
