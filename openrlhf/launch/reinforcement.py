"""Checks an RL run before its models are loaded, and creates the run."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path

from openrlhf.checkpoints.manager import CheckpointManager
from openrlhf.checkpoints.manifest import Checkpoint
from openrlhf.checks import Finding, collect, loaded, report
from openrlhf.cluster.placement import Placement
from openrlhf.cluster.ray_cluster import expected_machines
from openrlhf.config.ppo import PPOConfig
from openrlhf.data.batching import ResumableSampler
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.shown import SHOWN, show_template, show_text
from openrlhf.launch import settings
from openrlhf.launch.agents import check_agents
from openrlhf.launch.beginning import initial_state
from openrlhf.launch.identity import rl_identity
from openrlhf.launch.pass_sizes import check_pass_sizes
from openrlhf.launch.planning import drive_findings, memory_findings, plan_lines, plan_of_run
from openrlhf.launch.processes import Processes
from openrlhf.launch.prompt_data import PromptData, load_prompts
from openrlhf.launch.replay import replay_folder, start_of_episodes
from openrlhf.launch.run import Run
from openrlhf.launch.run_length import check_steps
from openrlhf.locks import check_unlocked
from openrlhf.models.proof import UNPROVEN
from openrlhf.models.stored_files import check_can_be_exported
from openrlhf.models.weights import require_finite_files
from openrlhf.planning.plan import Plan
from openrlhf.reporting import say
from openrlhf.rewards.preview import check_reward, check_reward_file
from openrlhf.rewards.remote_engines import offer_engines
from openrlhf.rollout.engine_check import check_engine_args
from openrlhf.trainers.checkpointing import SOURCE_PART
from openrlhf.trainers.remote_teacher import RemoteTeacher

LAYOUT_FLAGS = (
    "estimator, --ds.zero_stage, --ds.tensor_parallel_size, --ds.param_dtype, number of devices "
    "per role, --actor.optim and --critic.optim"
)
MORE_STEPS = (
    "For more steps, lower --train.batch_size or --rollout.batch_size, raise --train.num_episodes "
    "or use more prompts."
)
PREVIEWED = 4  # number of rows whose labels are scored before the run


def check_training(config: PPOConfig, data: PromptData, *, on_gpus: bool) -> list[Finding]:
    """Return findings about the number of steps and the micro-batch sizes."""
    total_steps = settings.optimizer_steps(config, len(data.train), after=config.frozen_steps)
    longest = max(data.train.lengths())
    if config.train.agent_func_path:
        longest = config.data.max_len
    found = check_steps(total_steps, config.actor, fix=MORE_STEPS)
    return found + check_pass_sizes(config, longest, on_gpus=on_gpus)


def prepare(config: PPOConfig, processes: Processes) -> Run | None:
    """Check and load everything a run needs except its models, then start its processes.

    Returns None for a dry run, which stops after the checks.
    """
    check_engines(config)
    checkpoints, checkpoint = find_checkpoint(config)
    begun = checkpoint.state.first_start if checkpoint else start_of_episodes(config)
    data = loaded(
        partial(load_prompts, config, begun),
        partial(check_reward_file, config.reward),
    )
    memory = plan_of_run(config, config.placement.cluster)
    found = check_parts(config, data, on_gpus=processes.plan.on_gpus)
    if config.placement.cluster is None:  # otherwise, the run is for other machines
        found += drive_findings(config.ds, memory)
    report(*found, *memory_findings(config, memory))
    start = initial_state(
        config,
        checkpoint,
        begun,
        layout=LAYOUT_FLAGS,
        engines=settings.state_layouts(config),
        identity=rl_identity(config, data.train),
    )
    done = 0
    if checkpoint:
        done = checkpoint.state.step
    replay = replay_folder(config, data, done=done)
    if config.dry_run:
        check_unlocked(Path(start.run_dir), f"--run.dir {start.run_dir}")
        show_plan(config, data, processes.plan, memory)
        return None
    if config.rollout.only:
        # No worker loads the policy, and vLLM does not check its weights.
        require_finite_files(config.actor.model_name_or_path)
    processes.start()
    return Run(config, data, start, processes, checkpoints, checkpoint, replay, memory)


def check_engines(config: PPOConfig) -> None:
    """Check the engine flags, and make the remote engines available to user code."""
    generates = not config.rollout.replay_dir
    if generates or config.remote_teacher:
        offer_engines(config.rollout, config.reward)
    if generates:
        report(*check_engine_args(config.vllm.engine_args))


def find_checkpoint(config: PPOConfig) -> tuple[CheckpointManager, Checkpoint | None]:
    """Return the manager of --ckpt.path, and the checkpoint to resume, if any."""
    parts = list(settings.state_layouts(config))
    if config.train.async_enable:
        parts.append(SOURCE_PART)
    checkpoints = CheckpointManager(config.ckpt, parts)
    if not config.ckpt.load_enable:
        return checkpoints, None
    checkpoint = checkpoints.latest()
    if checkpoint and not checkpoint.may_be_resumed_by(config):
        return checkpoints, None
    return checkpoints, checkpoint


def check_parts(config: PPOConfig, data: PromptData, *, on_gpus: bool) -> list[Finding]:
    """Return findings about the flags, exports, agents, rewards and the teacher."""
    checks: list[Callable[[], list[Finding] | None]] = []
    if not config.rollout.only:
        checks.append(partial(check_training, config, data, on_gpus=on_gpus))
        checks.append(partial(check_exports, config, data))
    if not config.rollout.replay_dir:
        rows = 0 if config.train.agent_func_path else min(PREVIEWED, len(data.train))
        previewed = [data.train[place] for place in range(rows)]
        sampling = settings.train_sampling(config)
        checks.append(partial(check_agents, config, data.tokenizer, data.train[0], sampling))
        checks.append(partial(check_reward, config.reward, previewed, data.tokenizer))
    if config.remote_teacher:
        teacher = RemoteTeacher.named(config.remote_teacher)
        checks.append(partial(teacher.check, data.tokenizer, max_len=config.data.max_len))
    return collect(*checks)


def check_exports(config: PPOConfig, data: PromptData) -> list[Finding]:
    """Return findings about the files that will be exported with the trained models.

    Raises UserError for files that cannot be exported.
    """
    paths = [config.actor.model_name_or_path]
    critic = config.critic.model_name_or_path
    if config.critic.save_value_network and critic and critic not in paths:
        paths.append(critic)
    found: list[Finding] = []
    trusted = config.model.trust_remote_code
    for path in paths:
        found += check_can_be_exported(path, data.tokenizer, trust_remote_code=trusted)
    return found


def show_plan(config: PPOConfig, data: PromptData, plan: Placement, memory: Plan | None) -> None:
    """Print the host groups, memory plan, number of steps and first prompts for --dry_run."""
    places = plan.check(expected_machines(plan.on_gpus, config.placement.cluster))
    say(plan.describe(places), *plan_lines(memory))
    sizes = config.step_sizes(len(data.train))
    most = "at most " if config.algo.dynamic_filtering_enable else ""
    say(f"{len(data.train)} prompts, {most}{len(sizes)} step(s) of {max(sizes)} prompts")
    order = ResumableSampler(len(data.train), seed=config.train.seed, drop_last=False)
    show_prompts(config, data.train, order)
    say(UNPROVEN)


def show_prompts(
    config: settings.SamplingCommand, prompts: PromptDataset, rows: Iterable[int] | None = None
) -> None:
    """Print the prompt format, and print the first prompts as the policy sees them.

    Prompts that are too long are truncated.
    """
    say(show_template(prompts.tokenizer))
    order = range(len(prompts)) if rows is None else rows
    for index in islice(order, SHOWN):
        row = prompts[index]
        title = f"prompt of row {row.index + 1}, label {row.label!r}"
        tokens = row.tokens
        if not config.train.agent_func_path:
            tokens = tokens[-settings.train_sampling(config).prompt_room :]
        if len(tokens) < len(row.tokens):
            title += f", truncated to the last of {len(row.tokens)} tokens"
        say(show_text(title, tokens, prompts.tokenizer))
