"""Tests that a replay has the steps, filtering and prompt positions of the recorded run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.config.algorithm import AlgoConfig
from openrlhf.config.learning import RLFlags, RLTrainConfig
from openrlhf.config.rollout import RewardConfig, RolloutConfig
from openrlhf.core.trajectory import Prompt, Trajectory
from openrlhf.data.errors import DataError
from openrlhf.observability.metrics import Metric
from openrlhf.rollout.background import BackgroundLoop, RolloutError
from openrlhf.rollout.episode_files import EpisodeFolder
from openrlhf.rollout.generator import Generator, Group, Request, SamplingSpec
from openrlhf.rollout.recorded import DumpingGenerator, ReplayGenerator
from openrlhf.trainers.sources import SyncSource, evaluate
from tests.full_disk import files_of_at_most
from tests.rollout.test_episode_files import IN_ONE_FOLDER
from tests.streams import rollout
from tests.trainers.episodes import episode

SPEC = SamplingSpec(
    purpose="train",
    rollout=RolloutConfig(n_samples_per_prompt=2, max_new_tokens=4),
    max_len=8,
    seed=0,
)
EVALUATION = replace(SPEC, purpose="eval", rollout=replace(SPEC.rollout, batch_size=2))
LOOP = BackgroundLoop()


class Prompts:
    """Prompt rows with different texts."""

    def __init__(self, count: int, name: str = "row") -> None:
        self.count, self.name = count, name

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index=index, text=f"{self.name} {index}", tokens=[index], label=b"not JSON")


class Dice:
    """A generator of samples whose random scores are equal in about half of the groups."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    async def rest(self) -> None: ...

    async def stream(
        self,
        prompts: Iterable[Prompt],
        request: Request,
        *,
        groups: int,
        at_once: int | None = None,
    ) -> AsyncIterator[Group]:
        for prompt in prompts:
            samples = [
                episode(
                    prompt.index, sample, score=float(self.draw.randint(0, 1)), text=prompt.text
                )
                for sample in range(request.spec.n_samples)
            ]
            group = await request.on_group(
                [Trajectory(**{**vars(t), "prompt": prompt}) for t in samples]
            )
            groups -= not group[0].filtered
            yield group
            if not groups:
                return

    def metrics(self) -> dict[str, Metric]:
        return {}


def run(
    prompts: Prompts,
    generator: Generator,
    *,
    batch_size: int = 2,
    filtered: bool = False,
    done: int = 0,
    consumed: int = 0,
    last_step: int | None = None,
) -> list[tuple[int, int, list[Any]]]:
    """Return the step, consumed prompts and episodes of each batch that the source yields."""
    rollout = replace(SPEC.rollout, batch_size=batch_size, vllm_generate_batch_size=batch_size)
    source = SyncSource(
        prompts,  # pyright: ignore[reportArgumentType]
        generator,
        LOOP,
        replace(SPEC, rollout=rollout),
        RLFlags(
            train=RLTrainConfig(num_episodes=2, seed=0, step_timeout=60.0),
            reward=RewardConfig(max_error_rate=1.0),
            algo=AlgoConfig(dynamic_filtering_enable=filtered),
        ),
        last_step=last_step,
    )
    source.resume(step=done, consumed=consumed, folder=Path())
    seen = []
    for trajectories in source:
        rest = all(t.filtered for t in trajectories)  # the rest of an epoch yields no step
        seen.append((source.step + rest, source.consumed, trajectories))
    return seen


def dumped(
    folder: Path, prompts: Prompts, *, seed: int = 0, **fields: Any
) -> list[tuple[int, int, list[Any]]]:
    files = EpisodeFolder(folder)
    files.begin(after=-1)
    return run(prompts, DumpingGenerator(Dice(seed), files, run={}), **fields)


def replayed(folder: Path, prompts: Prompts, **fields: Any) -> list[tuple[int, int, list[Any]]]:
    files = EpisodeFolder(folder)
    return run(prompts, ReplayGenerator(files), last_step=files.last_step, **fields)


@settings(IN_ONE_FOLDER, max_examples=40)
@given(st.integers(0, 999), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.data())
def test_replay_yields_the_same_batches_as_the_recorded_run(
    tmp_path: Path, seed: int, count: int, batch_size: int, filtered: bool, data: st.DataObject
) -> None:
    """A replay can start at any step, even if the rest of an epoch is filtered and yields no step.

    The labels include values that JSON cannot represent.
    """
    fields: dict[str, Any] = {"batch_size": batch_size, "filtered": filtered}
    seen = dumped(tmp_path, Prompts(count), seed=seed, **fields)
    steps = EpisodeFolder(tmp_path).steps()
    assert steps == sorted({step for step, _, _ in seen})
    assert replayed(tmp_path, Prompts(count), **fields) == seen
    if len(steps) > 1:
        done = data.draw(st.sampled_from(steps[:-1]))
        consumed = max(
            consumed
            for step, consumed, ts in seen
            if step == done and not all(t.filtered for t in ts)
        )
        rest = [each for each in seen if each[0] > done]
        assert replayed(tmp_path, Prompts(count), done=done, consumed=consumed, **fields) == rest


def test_filtered_episodes_are_written_with_their_tokens(tmp_path: Path) -> None:
    seen = dumped(tmp_path, Prompts(9), filtered=True)
    assert any(t.filtered for _, _, trajectories in seen for t in trajectories)
    files = EpisodeFolder(tmp_path)
    assert all(
        t.num_actions and not t.filtered for step in files.steps() for t in files.read("step", step)
    )


def test_replay_ends_after_the_last_recorded_step(tmp_path: Path) -> None:
    seen = dumped(tmp_path, Prompts(8))
    for path in sorted(tmp_path.glob("step-*"))[3:]:
        path.unlink()
    assert replayed(tmp_path, Prompts(8)) == seen[:3]


def test_evaluations_are_written_to_separate_files(tmp_path: Path) -> None:
    files = EpisodeFolder(tmp_path)
    files.begin(after=-1)
    generator = DumpingGenerator(Dice(0), files, run={})
    first = rollout(generator, [Prompt(index=0, text="a", tokens=[1])], SPEC, step=7)
    found = evaluate(Prompts(5), generator, LOOP, EVALUATION, step=6, timeout_s=60)  # pyright: ignore
    assert repr(files.read("eval", 6)) == repr(found).replace("b'not JSON'", repr("b'not JSON'"))
    assert files.read("step", 7) == first


def test_each_stream_of_a_step_adds_episodes_to_the_steps_file(tmp_path: Path) -> None:
    files = EpisodeFolder(tmp_path)
    files.begin(after=-1)
    generator = DumpingGenerator(Dice(0), files, run={})
    prompts = [Prompt(index=index, text="a", tokens=[1]) for index in range(3)]
    parts = [rollout(generator, [prompt], SPEC, step=1) for prompt in prompts]
    assert files.read("step", 1) == [t for part in parts for t in part]


def test_repeated_step_replaces_the_first_attempt(tmp_path: Path) -> None:
    dumped(tmp_path, Prompts(8))
    files = EpisodeFolder(tmp_path)
    files.begin(after=2)
    again = run(Prompts(8), DumpingGenerator(Dice(1), files, run={}), done=2, consumed=4)
    assert files.steps() == list(range(1, 9))
    assert replayed(tmp_path, Prompts(8))[2:] == again


@pytest.mark.parametrize(
    ("prompts", "fields", "words"),
    [
        (Prompts(8, "line"), {}, ["prompt 0 is 'row", "'line", "--data.prompt_dataset"]),
        (
            Prompts(8),
            {"batch_size": 3},
            ["has no sample of prompt 2", "step-000001", "--rollout.batch_size"],
        ),
        (Prompts(7), {}, ["'row", "--data.prompt_dataset"]),
    ],
    ids=["other texts", "larger batches", "another order"],
)
def test_replay_raises_if_prompts_differ_from_the_files(
    tmp_path: Path, prompts: Prompts, fields: dict[str, Any], words: list[str]
) -> None:
    dumped(tmp_path, Prompts(8))
    with pytest.raises(DataError) as caught:
        replayed(tmp_path, prompts, **fields)
    assert all(word in str(caught.value) for word in [*words, str(tmp_path), ".jsonl.gz"]), (
        caught.value
    )


def test_closing_a_recorded_stream_closes_the_stream_that_generates(tmp_path: Path) -> None:
    class Closing(Dice):
        is_closed = False

        async def stream(self, *args: Any, **options: Any) -> AsyncIterator[Group]:
            try:
                async for group in super().stream(*args, **options):
                    yield group
            finally:
                self.is_closed = True

    generator: Any = Closing(0)

    async def sample_once() -> bool:
        recorded = DumpingGenerator(generator, EpisodeFolder(tmp_path), run={})
        prompts = [Prompt(index=index, text="a", tokens=[1]) for index in range(2)]
        stream = recorded.stream(prompts, Request(spec=SPEC, step=1), groups=2)
        await anext(stream)
        await stream.aclose()
        return generator.is_closed

    assert asyncio.run(sample_once())
    assert len(EpisodeFolder(tmp_path).read("step", 1)) == SPEC.n_samples


def test_replay_raises_if_prompt_tokens_differ(tmp_path: Path) -> None:
    files = EpisodeFolder(tmp_path)
    files.begin(after=-1)
    prompt = Prompt(index=0, text="a", tokens=[1])
    rollout(DumpingGenerator(Dice(0), files, run={}), [prompt], SPEC)
    with pytest.raises(
        DataError,
        match=r"prompt 0 .*tokens \[1\]….*tokens \[2\]….*tokenizer",
    ):
        rollout(ReplayGenerator(files), [Prompt(index=0, text="a", tokens=[2])], SPEC)


def test_episode_file_that_cannot_be_written_is_reported_once_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = Prompts(6)
    with files_of_at_most(0):
        seen = dumped(tmp_path, prompts)
    assert [step for step, _, _ in seen] == [1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().err
    assert said.count(str(tmp_path)) == said.count("step-000001.jsonl.gz") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("capsys")
def test_run_whose_result_is_episodes_ends_if_a_file_cannot_be_written(tmp_path: Path) -> None:
    generator = DumpingGenerator(Dice(0), EpisodeFolder(tmp_path), run={}, required=True)
    with (
        files_of_at_most(0),
        pytest.raises(RolloutError, match=r"--rollout\.dump_dir.*step-000001"),
    ):
        run(Prompts(6), generator)
