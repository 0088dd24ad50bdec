"""From the flags of RL to a finished run: all checks before a model is loaded, then `Run`."""

import os
from collections.abc import Iterable
from itertools import islice

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import RunState
from openrlhf.cluster.placement import Placement
from openrlhf.cluster.ray_cluster import expected_machines
from openrlhf.config.flags import notice
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.batching import ResumableSampler
from openrlhf.data.findings import report
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.shown import SHOWN, show_template, show_text
from openrlhf.launch import settings
from openrlhf.launch.agents import check_agents
from openrlhf.launch.identity import rl_identity
from openrlhf.launch.pass_sizes import check_pass_sizes
from openrlhf.launch.processes import Processes
from openrlhf.launch.prompt_data import PromptData, load_prompts
from openrlhf.launch.ray_loss import RayLoss
from openrlhf.launch.replay import replay_folder, start_of_episodes
from openrlhf.launch.run import Run
from openrlhf.launch.run_length import check_steps
from openrlhf.models.proof import UNPROVEN
from openrlhf.models.stored_files import check_can_be_exported
from openrlhf.models.weights import require_finite_files
from openrlhf.rewards.preview import check_reward
from openrlhf.rewards.remote_engines import offer_engines
from openrlhf.rollout.engine_check import check_engine_args
from openrlhf.rollout.engine_settings import Device
from openrlhf.trainers.checkpointing import SOURCE
from openrlhf.trainers.remote_teacher import RemoteTeacher

MORE_STEPS = "For more steps lower --train.batch_size or --rollout.batch_size, raise --train.num_episodes or use more prompts."
PREVIEWED = 4  # rows whose labels are scored before the run


def check_training(config: PPOConfig, data: PromptData, *, on_gpus: bool) -> None:
    """Check number of steps, micro-batches and export. Raises ConfigError or CheckpointError for
    what cannot work.
    """
    total_steps = settings.optimizer_steps(config, len(data.train), after=config.frozen_steps)
    longest = config.data.max_len if config.train.agent_func_path else max(data.train.lengths())
    report(
        check_steps(total_steps, config.actor, fix=MORE_STEPS),
        check_pass_sizes(config, longest, on_gpus=on_gpus),
    )
    check_exports(config, data)


def train(config: PPOConfig, processes: Processes, loss: RayLoss) -> None:
    """Train as configured, in `processes`, which are started after the checks if they are not
    running yet.

    A dry run ends after the checks. `loss`: what happens if Ray dies.
    """
    kind: Device = "cuda" if processes.plan.on_gpus else "cpu"
    generates = not config.rollout.replay_dir
    if generates or config.remote_teacher:
        offer_engines(config.rollout, config.reward)
    if generates:
        check_engine_args(config.vllm.engine_args, kind)
    parts = [*settings.engine_layouts(config), *[SOURCE] * config.train.async_enable]
    checkpoints = CheckpointManager(config.ckpt, parts)
    checkpoint = checkpoints.latest() if config.ckpt.load_enable else None
    # A run that has restarted by itself continues this run, and no other with the same --ckpt.path.
    restarted = not config.given.get("ckpt.load_enable")
    if checkpoint and restarted and checkpoint.state.run_dir != os.path.abspath(config.run.dir):
        checkpoint = None
    begun = checkpoint.state.first_start if checkpoint else start_of_episodes(config)
    data = load_prompts(config, started=begun.moment, follows=begun.trained_format)
    if not config.rollout.only:
        check_training(config, data, on_gpus=processes.plan.on_gpus)
    if generates:
        check_agents(config, data.tokenizer)
        first = [] if config.train.agent_func_path else range(min(PREVIEWED, len(data.train)))
        check_reward(config.reward, [data.train[place] for place in first], data.tokenizer)
    if config.remote_teacher:
        RemoteTeacher.named(config.remote_teacher).check(
            data.tokenizer, max_len=config.data.max_len
        )
    run_dir = os.path.abspath(config.run.dir)
    if checkpoint:
        run_dir = checkpoint.state.continued_folder(run_dir)
    start = RunState(
        step=0,
        run_dir=run_dir,
        started=begun.moment,
        trained_format=begun.trained_format,
        engines=settings.engine_layouts(config),
        identity=rl_identity(config, data.train),
    )
    if checkpoint:
        words = "estimator, --ds.zero_stage, --ds.param_dtype and number of devices of each role"
        checkpoint.check_continued_by(start, layout=words, converts=config.ds.use_universal_ckpt)
    done, consumed = (checkpoint.state.step, checkpoint.state.consumed) if checkpoint else (0, 0)
    replay = replay_folder(config, data, done=done, consumed=consumed)
    if config.dry_run:
        return show_plan(config, data, processes.plan)
    if config.rollout.only:
        require_finite_files(
            config.actor.model_name_or_path
        )  # no worker loads the policy, and vLLM does not check
    processes.start()
    run = Run(config, data, start, kind, processes, checkpoints, checkpoint, replay)
    with loss.closing(run.recorder.close), run.started() as trainer:
        trainer.fit()
        loss.finished = True


def check_exports(config: PPOConfig, data: PromptData) -> None:
    """Print what is wrong with the generation configurations of the trained models. Raises
    UserError for unwritable files.
    """
    critic = config.critic.model_name_or_path if config.critic.save_value_network else None
    trusted = config.model.trust_remote_code
    for path in dict.fromkeys(
        [config.actor.model_name_or_path, critic or config.actor.model_name_or_path]
    ):
        notice(*check_can_be_exported(path, data.tokenizer, trust_remote_code=trusted))


def show_plan(config: PPOConfig, data: PromptData, plan: Placement) -> None:
    """Print the host groups, the number of steps and the first prompts, for --dry_run."""
    print(plan.describe(plan.check(expected_machines(plan.on_gpus, config.placement.cluster))))
    sizes = config.step_sizes(len(data.train))
    most = "at most " if config.algo.dynamic_filtering_enable else ""
    steps = f"{len(sizes)} step" if len(sizes) == 1 else f"{len(sizes)} steps"
    short = (
        f" (--rollout.batch_size {config.rollout.batch_size})"
        if max(sizes) < config.rollout.batch_size
        else ""
    )
    print(f"{len(data.train)} prompts, {most}{steps} of {max(sizes)} prompts{short}")
    order = ResumableSampler(len(data.train), seed=config.train.seed, drop_last=False)
    show_prompts(config, data.train, order)
    print(UNPROVEN)


def show_prompts(
    config: settings.Sampling, prompts: PromptDataset, rows: Iterable[int] | None = None
) -> None:
    """Print the format of the prompts, and the first of them as the policy will see them: cut, if
    they are too long.
    """
    print(show_template(prompts.tokenizer))
    order = range(len(prompts)) if rows is None else rows
    for index in islice(order, SHOWN):
        row = prompts[index]
        title, tokens = f"prompt of row {row.index + 1}, label {row.label!r}", row.tokens
        if not config.train.agent_func_path:
            tokens = tokens[-settings.train_sampling(config).prompt_room :]
        if len(tokens) < len(row.tokens):
            title += f", the end of {len(row.tokens)} tokens"
        print(show_text(title, tokens, prompts.tokenizer))
