"""Tests for the rollout engine with real Ray, real vLLM on the CPU, and gloo.

The trainer is a Transformers model in this process. All tests share two engines. One engine's model
has a head that is tied to its embeddings, and no tokenizer in its folder. The other engine's model
has an untied head and a tokenizer. The vocabulary size of 100 is not a multiple of 64, so vLLM pads
the vocabulary.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from packaging.version import Version
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from openrlhf.config.machine import installed
from openrlhf.config.rollout import VLLMConfig
from openrlhf.models.loading import pin_longrope
from openrlhf.rollout.engine import EngineError, RolloutEngine
from openrlhf.rollout.engine_settings import EngineSettings, engine_environment
from openrlhf.rollout.sampling import Generation, SamplingParams
from openrlhf.training.devices import free_port
from openrlhf.weights.buckets import TensorSpec
from openrlhf.weights.manifest import PublicationError, WeightManifest
from openrlhf.weights.receipts import WorkerReceipt
from openrlhf.weights.sender import WeightSender
from openrlhf.weights.transport import WeightGroup

VLLM = Version(installed("vllm").version)
VOCABULARY = 100
END_TOKEN = 1
MAX_LEN = 512
BUCKET_BYTES = 2**16  # about ten buckets
TIMEOUT_S = 240.0
PROMPTS = [[5, 6, 7, 8], [40, 41, 42], [9, 90, 11, 70, 13, 50], [33]]


class FaultyEngine(RolloutEngine):
    """A rollout engine that tests can make fail when it receives weights.

    The engine's worker runs in the same process.
    """

    def core(self) -> Any:
        """Return the engine's core, which runs in a thread of this process."""
        [thread] = (t for t in threading.enumerate() if t.name == "vllm-engine-core")
        return thread._args[-1].result()

    async def held(self) -> list[str]:
        """Return the unfinished requests whose tokens the core is holding back."""
        return list(self.core()._held)

    async def tokens_under_way(self) -> list[int]:
        """Return the number of tokens of each unfinished sample."""
        return [request.num_output_tokens for request in self.core().scheduler.running]

    async def sabotage(self, fault: str) -> None:
        """Make every update fail in a given way until `repair` is called."""
        from openrlhf.rollout import engine_worker
        from openrlhf.weights import receiver, transport

        channel = transport.BroadcastChannel
        self.originals = channel.receive, receiver.unpack, engine_worker.repack_linears
        receive, unpack, _ = self.originals

        def receive_flipped(self, buffer):
            receive(self, buffer)
            if buffer.numel() > 4096:  # corrupt weights, not hashes
                buffer[4096] ^= 1

        def unpack_all_but_one(bucket, buffer):
            return (
                item for item in unpack(bucket, buffer) if "layers.1.mlp.up_proj" not in item[0]
            )

        def unpack_one_twice(bucket, buffer):
            for item in unpack(bucket, buffer):
                yield from [item] * (2 if "layers.1.mlp.up_proj" in item[0] else 1)

        if fault == "flip":
            channel.receive = receive_flipped
        elif fault == "drop":
            receiver.unpack = unpack_all_but_one
        elif fault == "double":
            receiver.unpack = unpack_one_twice
        elif fault == "no repacking":
            engine_worker.repack_linears = lambda model: None

    async def repair(self) -> None:
        """Undo `sabotage`."""
        from openrlhf.rollout import engine_worker
        from openrlhf.weights import receiver, transport

        channel = transport.BroadcastChannel
        channel.receive, receiver.unpack, engine_worker.repack_linears = self.originals

    async def poison(self) -> None:
        """Make the engine core's next step fail."""

        def step():
            raise RuntimeError("poisoned")

        self.core().step_fn = step


@dataclass
class Stand:
    """An engine with the trainer's model and sender."""

    engine: ray.actor.ActorHandle
    settings: EngineSettings
    model: PreTrainedModel
    sender: WeightSender
    version: int = 0
    workers: int = 1  # number of engine workers

    def call(self, method: str, *args, **kwargs):
        return ray.get(getattr(self.engine, method).remote(*args, **kwargs), timeout=TIMEOUT_S)

    def join(self) -> None:
        join(self.sender, [self.engine], workers=self.workers)

    def manifest(self, bucket_bytes: int = BUCKET_BYTES) -> WeightManifest:
        self.version += 1
        return manifest_of(self.model, self.version, bucket_bytes)

    def receive(self, manifest: WeightManifest, tensors=None) -> tuple[WorkerReceipt, ...]:
        """Publish the weights without resuming generation."""
        receiving = self.engine.receive.remote(manifest)
        try:
            self.sender.send(manifest, tensors or self.model.named_parameters())
        finally:
            # If the engine fails, its error is more informative than the sender's.
            receipts = ray.get(receiving, timeout=TIMEOUT_S)
        return receipts

    def publish(self) -> tuple[WorkerReceipt, ...]:
        receipts = self.receive(self.manifest())
        self.call("resume")
        return receipts

    def sample(
        self, prompts: Sequence[list[int]] = PROMPTS, **params
    ) -> list[tuple[list[int], Generation]]:
        """Return one sample per prompt, each with its own seed."""
        chosen = [
            SamplingParams(**{"max_tokens": 24, "seed": i, "ignore_eos": True} | params)
            for i in range(len(prompts))
        ]
        calls = [self.engine.generate.remote(p, [c]) for p, c in zip(prompts, chosen, strict=True)]
        return [(p, g) for p, [g] in zip(prompts, ray.get(calls, timeout=TIMEOUT_S), strict=True)]

    def await_held(self, count: int) -> None:
        """Wait until the core holds back tokens of `count` samples."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.call("held")) != count:
            assert time.monotonic() < deadline


def manifest_of(
    model: PreTrainedModel, version: int, bucket_bytes: int = BUCKET_BYTES
) -> WeightManifest:
    specs = tuple(
        TensorSpec(name=name, dtype=torch.float32, shape=tuple(p.shape))
        for name, p in model.named_parameters()
    )
    return WeightManifest(version=version, specs=specs, bucket_bytes=bucket_bytes)


def group_of(workers: int, name: str | None = None, timeout_s: float = TIMEOUT_S) -> WeightGroup:
    """Return a weight group with a sender and `workers` engine workers."""
    return WeightGroup(
        host="127.0.0.1",
        port=free_port(),
        world_size=1 + workers,
        transport="gloo",
        name=name or f"group-{time.monotonic_ns()}",
        timeout_s=timeout_s,
    )


def join(
    sender: WeightSender, engines: Sequence[ray.actor.ActorHandle], *, workers: int = 1
) -> None:
    """Make the sender and the engines, with `workers` workers each, join one group."""
    group = group_of(workers * len(engines))
    joining = [engine.join.remote(group, 1 + workers * i) for i, engine in enumerate(engines)]
    sender.join(group)
    ray.get(joining, timeout=TIMEOUT_S)


@torch.no_grad()
def differences(
    model: PreTrainedModel, samples: Sequence[tuple[list[int], Generation]]
) -> torch.Tensor:
    """Return |log π_engine − log π_model| for each token, one row per sample."""
    rows = []
    for prompt, generation in samples:
        tokens = torch.tensor([prompt + generation.tokens])
        logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        reference = logprobs.gather(1, tokens[0, len(prompt) :, None]).squeeze(1)
        rows.append((reference - torch.tensor(generation.logprobs)).abs())
    return torch.stack(rows)


def assert_serves(stand: Stand, model: PreTrainedModel, version: int) -> None:
    samples = stand.sample()
    assert {g.weight_versions for _, g in samples} == {(version,)}
    off = differences(model, samples)
    assert off.max() < 1e-4 and off.mean() < 1e-5


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": END_TOKEN,
    "pad_token_id": 0,
    "initializer_range": 0.08,
}


def build_model(*, tied: bool) -> Qwen2ForCausalLM:
    torch.manual_seed(17 + tied)
    config = Qwen2Config(**SIZES, tie_word_embeddings=tied)
    return Qwen2ForCausalLM(config).eval()


def noisy_copy(model: PreTrainedModel, names: Sequence[str], scale: float) -> PreTrainedModel:
    """Copy the model, and add noise with standard deviation `scale` to the named tensors."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in copy.named_parameters():
            if name in names:
                p.add_(torch.randn(p.shape, generator=generator) * scale)
    return copy


def save_tokenizer(folder: Path) -> None:
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{END_TOKEN}").save_pretrained(
        folder
    )


def launch(
    model: PreTrainedModel,
    folder: Path,
    index: int = 0,
    *,
    stop_strings: bool = False,
    **flags: Any,
) -> Stand:
    """Save the model, and create an engine for it without starting the engine."""
    model.save_pretrained(folder)
    environment = {"env_vars": engine_environment("cpu") | {"HF_HUB_OFFLINE": "1"}}
    actor = ray.remote(FaultyEngine).options(num_cpus=0, runtime_env=environment)
    common = {
        "dtype": "fp32",
        "enable_prefix_caching": True,
        "engine_args": {"kv_cache_memory_bytes": 2**25},
    }
    vllm = VLLMConfig(**common | flags)
    made_of = EngineSettings(
        model=str(folder), vllm=vllm, max_model_len=MAX_LEN, stop_strings=stop_strings
    )
    return Stand(engine=actor.remote(index), settings=made_of, model=model, sender=WeightSender())


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=1, **quiet)
    yield
    ray.shutdown()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def stands(ray_session, tmp_path_factory) -> Iterator[dict[str, Stand]]:
    stands = {}
    for index, kind in enumerate(("tied", "untied")):
        folder = tmp_path_factory.mktemp(kind)
        if kind == "untied":
            save_tokenizer(folder)
        model = build_model(tied=kind == "tied")
        stands[kind] = launch(model, folder, index, stop_strings=kind == "untied")
    ray.get([stand.engine.start.remote(stand.settings) for stand in stands.values()], timeout=400)
    for stand in stands.values():
        assert_serves(stand, stand.model, version=0)
        stand.join()
    yield stands
    for stand in stands.values():
        ray.kill(stand.engine)


@pytest.fixture
def tied(stands) -> Stand:
    return stands["tied"]


@pytest.fixture
def untied(stands) -> Stand:
    return stands["untied"]


class TestSampling:
    def test_engine_logprobs_equal_model_logprobs(self, untied):
        off = differences(untied.model, untied.sample())
        assert off.max() < 1e-4 and off.mean() < 1e-5

    def test_seed_gives_the_same_tokens_in_any_batch(self, tied):
        alone = [tied.sample([p], seed=7)[0][1] for p in PROMPTS]
        # vLLM treats each kind of request differently.
        others = [{"seed": 1}, {"seed": None}, {"seed": None, "temperature": 0.0}]
        kinds = [SamplingParams(max_tokens=40, **each) for each in others]
        crowd = [tied.engine.generate.remote([i, 3], kinds) for i in range(8)]
        together = tied.sample(seed=7)
        ray.get(crowd, timeout=TIMEOUT_S)
        assert [g.tokens for _, g in together] == [g.tokens for g in alone]
        assert [g.logprobs for _, g in together] == [g.logprobs for g in alone]

    def test_each_sample_of_a_prompt_uses_its_own_parameters(self, tied):
        params = [SamplingParams(max_tokens=n, seed=n, ignore_eos=True) for n in (3, 9, 5)]
        samples = tied.call("generate", PROMPTS[0], params)
        assert [len(g.tokens) for g in samples] == [3, 9, 5]
        assert all(g.finish_reason == "length" and not g.text for g in samples)

    def test_long_prompt_with_a_seed_does_not_kill_the_engine(self, tied):
        prompts = [[5 + (i + j) % 90 for j in range(300)] for i in range(12)]
        assert len(tied.sample(prompts, max_tokens=2)) == 12

    def test_cancelled_sample_leaves_nothing_in_the_engine_core(self, tied):
        params = [SamplingParams(max_tokens=400, seed=i, ignore_eos=True) for i in range(2)]
        running = tied.engine.generate.remote([5, 6, 7], params)
        tied.await_held(2)
        ray.cancel(running)
        tied.await_held(0)
        assert_serves(tied, tied.model, tied.version)

    def test_end_token_and_stop_tokens_end_a_sample_and_are_included(self, tied):
        [(_, free)] = tied.sample([PROMPTS[0]], temperature=0.0)
        stop = free.tokens[4]
        expected = free.tokens[: free.tokens.index(stop) + 1]
        [(_, stopped)] = tied.sample([PROMPTS[0]], temperature=0.0, stop_token_ids=[stop])
        assert (stopped.tokens, stopped.finish_reason, stopped.stop_reason) == (
            expected,
            "stop",
            stop,
        )
        ended = tied.sample([[i] for i in range(3, 60)], ignore_eos=False, max_tokens=200)
        ended = [g for _, g in ended if g.finish_reason == "stop"]
        assert ended and all(g.tokens.index(END_TOKEN) == len(g.tokens) - 1 for g in ended)
        assert {g.stop_reason for g in ended} == {None}

    def test_stop_string_ends_a_sample_and_is_excluded_from_its_text(self, untied):
        [(_, free)] = untied.sample([PROMPTS[0]], temperature=0.0)
        stop = f"w{free.tokens[4]}"
        cut = free.tokens.index(free.tokens[4]) + 1
        [(_, stopped)] = untied.sample([PROMPTS[0]], temperature=0.0, stop=[stop])
        assert (stopped.tokens, stopped.stop_reason) == (free.tokens[:cut], stop)
        assert stopped.text.split() == [f"w{t}" for t in free.tokens[: cut - 1]]

    @pytest.mark.parametrize(
        ("prompt", "params", "reason"),
        [
            ([5] * (MAX_LEN + 1), SamplingParams(max_tokens=1), "maximum"),
            ([5], SamplingParams(stop="x"), "stop_strings"),
        ],
    )
    def test_invalid_request_raises_engine_error_and_leaves_the_engine_alive(
        self, tied, prompt, params, reason
    ):
        with pytest.raises(EngineError, match=reason):
            tied.call("generate", prompt, [params])
        assert len(tied.sample()) == len(PROMPTS)
        assert "vllm" not in sys.modules  # raising the error did not import vLLM here


class TestPublication:
    @pytest.mark.parametrize(
        ("kind", "name", "scale"),
        [
            ("tied", "model.embed_tokens.weight", 0.05),
            ("tied", "model.layers.0.self_attn.q_proj.weight", 0.1),
            ("tied", "model.layers.1.mlp.down_proj.weight", 0.1),
            ("tied", "model.norm.weight", 0.5),
            ("untied", "model.embed_tokens.weight", 0.05),
            ("untied", "lm_head.weight", 0.05),
            ("untied", "model.layers.1.self_attn.k_proj.bias", 1.0),
            ("untied", "model.layers.0.self_attn.v_proj.weight", 0.1),
            ("untied", "model.layers.1.input_layernorm.weight", 0.5),
            ("untied", "model.layers.0.mlp.gate_proj.weight", 0.1),
        ],
    )
    def test_engine_serves_a_publication_in_which_one_tensor_changed(
        self, stands, kind, name, scale
    ):
        stand = stands[kind]
        old, stand.model = stand.model, noisy_copy(stand.model, [name], scale)
        stand.publish()
        assert_serves(stand, stand.model, stand.version)
        assert differences(old, stand.sample()).max() > 1e-2

    @pytest.mark.parametrize("kind", ["tied", "untied"])
    def test_running_samples_continue_with_the_new_weights(self, stands, kind):
        """The untied model's engine searches for stop strings.

        The engine core therefore sends every token separately.
        """
        stand: Stand = stands[kind]
        old = stand.model
        names = [name for name, _ in old.named_parameters()]
        params = [SamplingParams(max_tokens=400, seed=i, ignore_eos=True) for i in range(4)]
        stand.model = noisy_copy(old, names, 0.02)
        running = stand.engine.generate.remote([5, 6, 7], params)
        deadline = time.monotonic() + TIMEOUT_S
        while min(counts := stand.call("tokens_under_way"), default=0) == 0 or len(counts) < 4:
            assert time.monotonic() < deadline
        stand.publish()
        samples = [([5, 6, 7], g) for g in ray.get(running, timeout=TIMEOUT_S)]
        assert {g.weight_versions for _, g in samples} == {(stand.version - 1, stand.version)}
        matches_old, matches_new = (differences(m, samples) < 1e-4 for m in (old, stand.model))
        for row_old, row_new in zip(matches_old, matches_new, strict=True):
            # number of leading tokens that the old weights can explain
            switch = int(row_old.long().cumprod(0).sum())
            assert 0 < switch < 400
            assert row_new[switch:].all()

    def test_two_engines_in_one_group_serve_the_same_version(self, tied, untied):
        """The tied engine receives its head twice: as embeddings and as an identical head."""
        model = noisy_copy(untied.model, [], 0.0)
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
        sender, version = WeightSender(), max(tied.version, untied.version) + 1
        pair = [tied, untied]
        join(sender, [stand.engine for stand in pair])
        manifest = manifest_of(model, version)
        receiving = [stand.engine.receive.remote(manifest) for stand in pair]
        sender.send(manifest, model.named_parameters())
        ray.get(receiving, timeout=TIMEOUT_S)
        for stand in pair:
            stand.call("resume")
            stand.version = version
            assert_serves(stand, model, version)
        sender.leave()
        for stand in pair:
            stand.join()
            stand.publish()

    def test_every_worker_of_a_tensor_parallel_engine_loads_the_weights(
        self, ray_session, tmp_path
    ):
        """Each of the two workers has a rank in the weight group and its own receipt."""
        stand = launch(build_model(tied=True), tmp_path, tensor_parallel_size=2)
        stand.workers = 2
        ray.get(stand.engine.start.remote(stand.settings), timeout=400)
        assert_serves(stand, stand.model, version=0)
        stand.join()
        for _ in range(2):
            stand.model = noisy_copy(
                stand.model, [name for name, _ in stand.model.named_parameters()], 0.05
            )
            assert [receipt.rank for receipt in stand.publish()] == [1, 2]
            assert_serves(stand, stand.model, stand.version)
        stand.call("stop")
        ray.kill(stand.engine)

    def test_paused_engine_answers_after_resume(self, tied):
        tied.call("pause")
        waiting = tied.engine.generate.remote(PROMPTS[0], [SamplingParams(max_tokens=4, seed=0)])
        assert ray.wait([waiting], timeout=0.5)[0] == []
        tied.call("resume")
        assert len(ray.get(waiting, timeout=TIMEOUT_S)) == 1

    @pytest.mark.skipif(Version("0.28") > VLLM, reason="this vLLM has no kernel for it on a CPU")
    def test_quantized_engine_quantizes_every_publication(self, ray_session, tmp_path):
        first = build_model(tied=False)
        second = noisy_copy(first, [name for name, _ in first.named_parameters()], 0.05)
        stand = launch(first, tmp_path, dtype="bf16", quantization="fp8_per_channel")
        stand.call("start", stand.settings)
        stand.join()
        loaded = stand.sample()
        stand.model = second
        stand.publish()
        changed = stand.sample()
        assert differences(second, changed).mean() < differences(first, changed).mean() / 3
        stand.model = first
        stand.publish()
        assert [(g.tokens, g.logprobs) for _, g in stand.sample()] == [
            (g.tokens, g.logprobs) for _, g in loaded
        ]
        ray.kill(stand.engine)


class TestFailedPublication:
    @pytest.fixture(autouse=True)
    def recovers(self, tied) -> Iterator[None]:
        """Assert that a faulty engine refuses to serve until the next complete publication."""
        yield
        with pytest.raises(EngineError, match="unverified"):
            tied.call("resume")
        tied.publish()
        assert_serves(tied, tied.model, tied.version)

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("flip", "bucket 0 with hash"),
            (
                "drop",
                r"loaded model.layers.1.mlp.up_proj.weight 0 times.*stale values in .*gate_up_proj",
            ),
            # the layer was already full, so vLLM's loader raises the error
            ("double", "weight_loader" if Version("0.25") <= VLLM else "loaded .* 2 times"),
            pytest.param(
                "no repacking",
                "repack lm_head",
                marks=pytest.mark.skipif(
                    Version("0.28") > VLLM, reason="the tied head is the embedding before 0.28"
                ),
            ),
        ],
    )
    def test_incomplete_version_is_rejected(self, tied, fault, message):
        tied.call("sabotage", fault)
        manifest = tied.manifest()
        try:
            with pytest.raises(
                PublicationError, match=rf"version {manifest.version}\b.*({message})"
            ):
                tied.receive(manifest)
        finally:
            tied.call("repair")
        tied.join()

    @pytest.mark.parametrize(
        "name", ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]
    )
    def test_manifest_without_a_tensor_is_rejected(self, tied, name):
        manifest = tied.manifest()
        manifest = replace(manifest, specs=tuple(s for s in manifest.specs if s.name != name))
        tensors = [item for item in tied.model.named_parameters() if item[0] != name]
        with pytest.raises(PublicationError, match="stale values in"):
            tied.receive(manifest, tensors)

    def test_tensor_unknown_to_the_engine_is_rejected(self, tied):
        manifest = tied.manifest()
        specs = [
            replace(s, name="model.surprise") if s.name == "model.norm.weight" else s
            for s in manifest.specs
        ]
        tensors = [(s.name, p) for s, p in zip(specs, tied.model.parameters(), strict=True)]
        said = "surprise" if Version("0.25") <= VLLM else r"stale values in model\.norm"
        with pytest.raises(PublicationError, match=said):
            tied.receive(replace(manifest, specs=tuple(specs)), tensors)
        tied.join()


def send_until_killed(group: WeightGroup, folder: str, version: int) -> None:
    """Send weights like a trainer that dies when the tensor after the first q_proj is requested."""
    model = Qwen2ForCausalLM.from_pretrained(folder)

    def tensors():
        for name, p in model.named_parameters():
            if name == "model.layers.0.self_attn.k_proj.weight":
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, p

    sender = WeightSender()
    sender.join(group)
    sender.send(manifest_of(model, version, bucket_bytes=1), tensors())


class TestFailure:
    def test_engine_recovers_from_a_sender_killed_in_the_middle_of_a_layer(self, tied, tmp_path):
        """With one tensor per bucket, q_proj arrives and k_proj does not.

        vLLM must not count q_proj twice in the next publication.
        """
        tied.model.save_pretrained(tmp_path)
        running = tied.engine.generate.remote(
            [5], [SamplingParams(max_tokens=400, ignore_eos=True)]
        )
        tied.sender.leave()
        group = group_of(1, "doomed", timeout_s=120.0)
        victim = multiprocessing.get_context("spawn").Process(
            target=send_until_killed, args=(group, str(tmp_path), tied.version + 1)
        )
        victim.start()
        tied.call("join", group, 1)
        began = time.monotonic()
        with pytest.raises(PublicationError, match="died or did not respond"):
            tied.call("receive", tied.manifest(bucket_bytes=1))
        assert time.monotonic() - began < 60  # well before the deadline of 120 s
        victim.join(10)
        assert victim.exitcode == -signal.SIGKILL
        with pytest.raises(EngineError, match="unverified"):
            tied.call("resume")
        tied.model = noisy_copy(tied.model, [n for n, _ in tied.model.named_parameters()], 0.02)
        tied.join()
        tied.publish()
        [survivor] = ray.get(running, timeout=TIMEOUT_S)
        assert len(survivor.tokens) == 400 and survivor.weight_versions[-1] == tied.version
        assert_serves(tied, tied.model, tied.version)

    def test_error_names_member_that_never_joins(self, tied):
        group = group_of(2, "lonely", timeout_s=1.0)
        joining = tied.engine.join.remote(group, 1)
        with pytest.raises(PublicationError, match=r"ranks \[2\] did not join within 1 s"):
            WeightSender().join(group)
        with pytest.raises(EngineError, match="weight group lonely"):
            ray.get(joining, timeout=TIMEOUT_S)
        tied.join()

    def test_dead_engine_core_raises_engine_error(self, ray_session, tmp_path):
        stand = launch(build_model(tied=True), tmp_path)
        stand.call("start", stand.settings)
        stand.call("poison")
        with pytest.raises(EngineError, match="engine 0, generate: EngineDeadError"):
            stand.sample()
        ray.kill(stand.engine)


@pytest.mark.verify
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
        ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 32}),
        ("phi3", {"tie_word_embeddings": False}),
        ("gpt2", {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": MAX_LEN}),
        ("opt", {"ffn_dim": 160, "word_embed_proj_dim": 128}),
        pytest.param(
            # vLLM packs experts only once, unless the experts' kernel has to be rebuilt.
            "qwen3_moe",
            {
                "head_dim": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
            },
            marks=pytest.mark.skipif(
                Version("0.25") > VLLM,
                reason="only knows experts by their names in files, which runs send",
            ),
        ),
    ],
)
def test_every_parameter_of_an_architecture_reaches_the_engine(ray_session, tmp_path, kind, sizes):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES | sizes)
    stand = launch(AutoModelForCausalLM.from_config(config).eval(), tmp_path)
    ray.get(stand.engine.start.remote(stand.settings), timeout=400)
    stand.join()
    for _ in range(2):
        names = [name for name, _ in stand.model.named_parameters()]
        stand.model = noisy_copy(stand.model, names, 0.05)
        stand.publish()
        assert_serves(stand, stand.model, stand.version)
    ray.kill(stand.engine)


@pytest.mark.verify
@pytest.mark.parametrize("original", [16, MAX_LEN])
def test_longrope_uses_the_frequencies_for_the_longest_sequence_in_engine_and_trainer(
    ray_session, tmp_path, original
):
    """The engine chooses the frequencies according to its max_model_len.

    If max_model_len exceeds `original`, samples of any length use the long frequencies.
    """
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + place / 4 for place in range(16)],
        "original_max_position_embeddings": original,
    }
    torch.manual_seed(1)
    changes = {"tie_word_embeddings": False, "original_max_position_embeddings": original}
    config = AutoConfig.for_model("phi3", **SIZES | changes, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).eval()
    stand = launch(model, tmp_path)
    ray.get(stand.engine.start.remote(stand.settings), timeout=400)
    pin_longrope(model, MAX_LEN)
    assert_serves(stand, model, version=0)
    ray.kill(stand.engine)
