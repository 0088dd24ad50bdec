"""Memory that DeepSpeed, PyTorch and vLLM allocate for each role on one rank at each instant.

The training state depends on DeepSpeed's optimizer: torch's own at stage 0, `BF16_Optimizer` at
stage 1 in bfloat16, `DeepSpeedZeroOptimizer` otherwise at stages 1 and 2, and
`DeepSpeedZeroOptimizer_Stage3` at stage 3. If a rank has T trained weights after tensor
parallelism, it owns the optimizer state of T ÷ ranks weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from openrlhf.planning.activations import PassBytes, pass_bytes
from openrlhf.planning.constants import Constants
from openrlhf.planning.roles import DTYPE_BYTES, ModelRole, Pass
from openrlhf.planning.trained import largest_trained, local_size, moment_width, trained_weights
from openrlhf.planning.usage import Instant, Usage, largest
from openrlhf.units import MIB

BUCKET_BYTES = {"cpu": 64 * MIB, "cuda": 256 * MIB}  # `workers.base.BUCKET_BYTES`
REDUCE_BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size, in elements
LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's stage3_max_reuse_distance, in elements
SUB_GROUP = 1_000_000_000  # DeepSpeed's sub_group_size, in elements
PERSISTENT_WIDTH = 10  # ZeRO 3 does not shard weights of fewer than 10 · h elements
PROOF = Pass(tokens=34, longest=17, scored=26)  # `models.proof` scores two short sequences
SAMPLED_WEIGHTS = 4_000_000  # `training.masters.MAX_SAMPLED_WEIGHTS`
# NF4 with double quantization: 4 bits, one byte per 64 weights, one float32 per 64 · 256 weights.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Size in bytes of the gradients on one rank."""

    idle: int = 0  # buffers that exist between optimizer steps
    kept: int = 0  # added to `idle` between the micro-batches of a step
    backward: int = 0  # added to `idle` and `kept` while a backward pass runs
    step: int = 0  # added to `idle` and `kept` while the optimizer steps
    host: int = 0  # in CPU memory, if the optimizer is offloaded


@dataclass(frozen=True)
class RoleMemory:
    """The memory of a role on one rank."""

    role: ModelRole
    constants: Constants

    @cached_property
    def trained(self) -> int:
        """The number of trained weights on this rank, before ZeRO."""
        return trained_weights(self.role)

    @cached_property
    def largest_trained(self) -> int:
        """The number of elements in the largest trained weight on this rank, before ZeRO."""
        return largest_trained(self.role)

    @cached_property
    def owned(self) -> int:
        """The number of trained weights whose optimizer state is on this rank."""
        if self.role.zero_stage == 0:
            return self.trained
        return -(-self.trained // self.role.ranks)

    @cached_property
    def whole_bytes(self) -> int:
        """The size of all weights on this rank before ZeRO 3 shards them, in bytes."""
        role = self.role
        total = 0.0
        for weight in role.shape.weights:
            width = NF4_BYTES if role.load_in_4bit and weight.is_linear else role.width
            total += width * local_size(role, weight)
        if role.lora_rank:
            total += role.width * self.trained
        return round(total)

    @cached_property
    def weight_bytes(self) -> int:
        """The size of the weights between passes, on the device or in CPU memory, in bytes."""
        role = self.role
        if not role.sharded:
            return self.whole_bytes
        small = PERSISTENT_WIDTH * role.shape.hidden
        kept = sum(weight.numel for weight in role.shape.weights if weight.numel < small)
        return self.whole_bytes // role.ranks + role.width * kept

    @property
    def resting_bytes(self) -> int:
        """The size of the device's weights between passes, without gathered weights, in bytes."""
        if self.role.param_offload:
            return 0
        return self.weight_bytes

    @cached_property
    def gathered_bytes(self) -> int:
        """The size of the weights that ZeRO 3 gathers in a pass without gradient, in bytes.

        DeepSpeed keeps a gathered weight, even after the pass, if fewer than 10⁹ elements of
        weights are used before it is needed again.
        """
        role = self.role
        if not role.sharded:
            return 0
        gathered = LIVE_PARAMETERS + role.shape.largest_weight
        return role.width * min(role.shape.parameters, gathered)

    @property
    def _gathered_in_training(self) -> int:
        """The size of the weights that are gathered at the same time in a training pass, in bytes.

        DeepSpeed has recorded the order of the weights, so it frees each weight after use.
        """
        return min(self.gathered_bytes, self.role.width * self.role.shape.largest_weight)

    @property
    def second_copy_bytes(self) -> int:
        """The size of this rank's part of the second copy of the weights (hpZ), on any device."""
        if self.role.zpg == 1:
            return 0
        return self.whole_bytes // self.role.zpg

    @cached_property
    def optimizer_bytes(self) -> int:
        """The size of moments and float32 master weights in bytes, on any device."""
        role = self.role
        if not role.trained:
            return 0
        masters = 0 if role.zero_stage == 0 else 4
        return masters * self.owned + self.moment_bytes

    @cached_property
    def moment_bytes(self) -> int:
        """The size of the optimizer's moments in bytes, on any device."""
        return round(moment_width(self.role) * self.owned)

    @property
    def _has_bf16_optimizer(self) -> bool:
        """True if DeepSpeed uses `BF16_Optimizer`."""
        role = self.role
        return role.zero_stage == 1 and role.dtype == "bf16" and not role.adam_offload

    @cached_property
    def gradients(self) -> Gradients:
        """The size of the gradients at the role's ZeRO stage."""
        role, owned, g = self.role, self.owned, self._sum_width
        if not role.trained:
            return Gradients()
        norm = self._norm_bytes()
        if role.zero_stage == 3:
            # the reduce bucket of h² elements, and the unsharded gradient of the largest weight
            reduced = role.width * (role.shape.hidden**2 + self.largest_trained)
            if role.adam_offload:
                return Gradients(backward=reduced, host=(g + 4) * owned)
            step = max(4 * min(owned, SUB_GROUP), norm)
            return Gradients(idle=g * owned, backward=reduced, step=step)
        if role.zero_stage == 0:
            flattened = role.width * min(self.trained, REDUCE_BUCKET)
            return Gradients(kept=role.width * self.trained, step=flattened)
        if self._has_bf16_optimizer:
            # `BF16_Optimizer` does not shard its buffer.
            # A step flattens the buffer, even on one rank, and all-reduces a bfloat16 copy of it.
            return Gradients(
                idle=g * self.trained,
                kept=role.width * self.trained,
                backward=4 * self.largest_trained,
                step=(g + self._copy_width) * self.trained,
            )
        return self._zero_gradients()

    @property
    def _sum_width(self) -> int:
        """Bytes per element of the sums of gradients."""
        return DTYPE_BYTES[self.role.grad_accum_dtype]

    @property
    def _copy_width(self) -> int:
        """Bytes per element of gradient copies in the weights' dtype; 0 if sums have this dtype."""
        width = self.role.width
        return width if self._sum_width != width else 0

    def _zero_gradients(self) -> Gradients:
        """Return the size of the gradients of `DeepSpeedZeroOptimizer` (stages 1 and 2)."""
        role, owned, g = self.role, self.owned, self._sum_width
        norm = self._norm_bytes()
        host = 0
        if role.adam_offload:
            host = 4 * owned + role.width * owned + role.width * self.largest_trained
        if role.zero_stage == 1:
            whole = g * self.trained  # each gradient is freed once it is added to its sum
            flattened = 0 if role.adam_offload else 4 * self.trained
            step = max(flattened, self._reduced_in_step() - whole, norm)
            bucket = g * self._bucket_elements(0)  # this bucket has the accumulation dtype
            return Gradients(kept=whole, backward=bucket, step=step, host=host)
        # gradients are freed once their bucket is full
        pending = role.width * min(self.trained, REDUCE_BUCKET)
        bucket = role.width * self._bucket_elements(self.trained)
        if role.adam_offload:
            bucket += role.width * self.largest_trained
            if not self._copy_width:
                step = max(pending, norm)
                return Gradients(backward=bucket + pending, step=step, host=host + 4 * owned)
        if self._copy_width:
            pending += 4 * self.largest_trained
            return Gradients(kept=g * owned, backward=bucket + pending, step=norm, host=host)
        backward = bucket + pending - g * owned
        step = max(4 * owned, norm, self._received_bytes() - g * owned)
        return Gradients(kept=g * owned, backward=backward, step=step)

    def _received_bytes(self) -> int:
        """Return the size of the buffer in which a rank receives all stepped weights.

        Only gloo, which connects ranks on CPUs, has such a buffer. The gradients are freed before.
        """
        if self.constants.device == "cuda" or self.role.ranks == 1:
            return 0
        return self.role.width * self.trained

    def _reduced_in_step(self) -> int:
        """Return the size of the gradients while a stage 1 step reduces them.

        As many gradients as fit are in the reduce bucket. These gradients are flattened, and they
        are copied again if the reduction uses the weights' data type. The rank keeps its part of
        the sums.
        """
        g, copy = self._sum_width, self._copy_width
        in_bucket = min(self.trained, REDUCE_BUCKET)
        flattened = (g + copy) * in_bucket
        sums = g * self.owned
        if not copy:
            flattened, sums = max(flattened, sums), 0  # the bucket is freed before the copy is made
            if self.role.adam_offload and self.role.ranks == 1:
                # one slice of the bucket is reduced in place, and copied to CPU memory by weight
                flattened = 0
        bucket = g * self._bucket_elements(in_bucket)
        return bucket + g * (self.trained - in_bucket) + flattened + sums

    def _norm_bytes(self) -> int:
        """Return the size of the float64 copy from which ZeRO computes a gradient's norm.

        One gradient, or this rank's part of a gradient, is copied at a time.
        """
        role = self.role
        if not role.sharded:
            return 8 * min(self.largest_trained, self.owned)
        if role.adam_offload:
            return 0  # the gradients are in CPU memory
        return 8 * -(-self.largest_trained // role.ranks)

    def _bucket_elements(self, written: int) -> int:
        """Return how many elements of the reduce bucket take up memory once `written` are written.

        On a GPU, the entire bucket takes up memory; on a CPU, only the pages that are written do.
        """
        if self.constants.device == "cuda":
            return REDUCE_BUCKET * (2 if self.role.overlap_comm else 1)
        return min(written, REDUCE_BUCKET)

    def idle(self, *, awake: bool) -> Usage:
        """Return the device memory between passes."""
        role = self.role
        fixed = self.constants.role_bytes
        if role.width < 4:
            fixed += self.constants.rounded_bytes
        if role.trained and role.sharded:
            fixed += self.constants.sharded_bytes
        usage = Usage(framework=fixed, weights=self.resting_bytes)
        if role.trained:
            usage += Usage(optimizer=self._sampled_bytes())
        else:
            usage += Usage(weights=self.gathered_bytes)  # gathered weights are kept after a pass
        if role.sleeps and not awake:
            return usage
        if not role.adam_offload:
            usage += Usage(optimizer=self.optimizer_bytes)
        return usage + Usage(gradients=self.gradients.idle)

    def weights_added_by_pass(self) -> Usage:
        """Return the memory of the weights that are on the device only during a pass."""
        role = self.role
        if role.param_offload and not role.sharded:
            return Usage(weights=self.whole_bytes)
        if not role.trained:
            return Usage()  # `idle` counts them
        return Usage(weights=self.gathered_bytes)

    def idle_before_first_step(self) -> Usage:
        """Return the device memory between passes before the first step creates the moments."""
        idle = self.idle(awake=True)
        if not self.role.trained or self.role.adam_offload:
            return idle
        return replace(idle, optimizer=idle.optimizer - self.moment_bytes)

    def load_peak(self) -> Usage:
        """Return the peak while the model is loaded and checked and its optimizer is created."""
        role = self.role
        idle = self.idle_before_first_step()
        candidates = [self.proof_peak()]
        on_cpu = self.constants.device == "cpu"
        if role.sharded and on_cpu:
            # the files' pages count as memory while each rank copies its part of them
            read = role.width * role.shape.parameters + 8 * role.shape.largest_weight
            reading = Usage(weights=self.resting_bytes + read, framework=idle.framework)
            candidates.append(reading)
        elif on_cpu and not role.trained and role.width < role.shape.stored_width:
            # the files' pages count as memory until all of their weights are rounded
            read = role.shape.stored_width * role.shape.parameters
            candidates.append(idle + Usage(weights=read))
        if role.trained and role.zero_stage > 0:
            candidates += self._optimizer_creation(idle)
        return largest(*candidates)

    def proof_peak(self) -> Usage:
        """Return the peak of the check of the batch layout (`models.proof`)."""
        sp = self.role.sp
        batch = replace(
            PROOF,
            # Every rank of a ring also scores each sequence alone.
            tokens=max(PROOF.tokens // sp, PROOF.longest),
            scored=max(PROOF.scored // sp, PROOF.longest),
            packed=(self.role.training or self.role.scoring or PROOF).packed,
        )
        role = replace(self.role, gradient_checkpointing=False)  # only training uses checkpointing
        sizes = pass_bytes(role, batch, self.constants)
        passes = Usage(activations=sizes.saved, logits=sizes.backward_logits)
        return self.idle_before_first_step() + self.weights_added_by_pass() + passes

    def _optimizer_creation(self, idle: Usage) -> list[Usage]:
        """Return the memory while weights are flattened and while master weights are created."""
        role = self.role
        flat = role.width * (self.owned if role.sharded else self.trained)
        if self.constants.device == "cuda" and not self._has_bf16_optimizer:
            flat = 0  # DeepSpeed copies the weights through CPU memory if the device is full
        flattened = Usage(weights=self.resting_bytes + flat, framework=idle.framework)
        grown = idle
        if not role.adam_offload:
            # the master weights are slices of a copy of the weights
            copied = self.owned if role.sharded else self.trained
            if role.width < 4 and not self._has_bf16_optimizer:
                copied = 0  # the slices are converted to float32, without a copy of all weights
            grown += self.weights_added_by_pass() + Usage(weights=role.width * copied)
        if role.width < 4 and not role.lora_rank:
            # restoring low bits takes the largest weight three times: stored, float32, rounded
            grown += Usage(weights=9 * role.shape.largest_weight)
        return [flattened, grown]

    def score_peak(self) -> Usage:
        """Return the peak of forward passes without gradient."""
        batch = self.role.scoring
        if batch is None:
            return self.idle(awake=False)
        sizes = pass_bytes(self.role, batch, self.constants)
        activations = Usage(activations=sizes.scoring)
        logits = Usage(logits=sizes.forward_logits)
        needed = largest(activations, logits)
        return self.idle(awake=False) + self.weights_added_by_pass() + needed

    def train_peaks(self) -> dict[Instant, Usage]:
        """Return the peaks of a training pass and of the optimizer step."""
        batch = self.role.training
        if batch is None:
            return {}
        sizes = pass_bytes(self.role, batch, self.constants)
        gradients = self.gradients
        copy = 0 if self.role.param_offload else self.second_copy_bytes
        fixed = self.idle(awake=True) + Usage(
            logits=self.role.teacher_bytes,
            weights=copy + self._gathered_in_training,
        )
        earlier = gradients.kept if self.role.window > 1 else 0
        inner = sizes.training
        if self.role.gradient_checkpointing and self.role.checkpoint_every == 1:
            inner = sizes.scoring  # layers run without saving their activations
        # the peak is in the last layer or in the output layer
        saved = Usage(activations=sizes.saved, gradients=earlier)
        last = largest(Usage(activations=inner), Usage(logits=sizes.forward_logits))
        forward = fixed + saved + last
        summed = gradients.kept + gradients.backward
        backward = fixed + _backward(sizes, earlier=earlier, summed=summed)
        step = self.idle(awake=True) + Usage(
            gradients=gradients.kept + gradients.step,
            optimizer=self._sampled_bytes(),
            weights=copy,
        )
        return {Instant.FORWARD: forward, Instant.BACKWARD: backward, Instant.STEP: step}

    def _sampled_bytes(self) -> int:
        """Return the size of the weight copies from which the changes in a step are counted."""
        if self.role.dtype == "fp32":
            return 0
        return self.role.width * min(self.owned, SAMPLED_WEIGHTS)

    def publish_peak(self) -> Usage:
        """Return the peak while weights are sent to the engines, bucket by bucket."""
        role = self.role
        if not role.publishes:
            return self.idle(awake=False)
        limit = BUCKET_BYTES[self.constants.device]
        bucket = min(limit, role.width * role.shape.parameters)
        biggest = role.width * role.shape.largest_weight
        if role.adapter_only:
            biggest = role.width * self.largest_trained
            bucket = min(bucket, role.width * self.trained)
        buffers = max(bucket, biggest)
        buffers += self._gathered_to_publish(bucket, biggest)
        if role.lora_rank and not role.adapter_only:
            # All merged weights of a bucket exist at the same time. The embeddings are sent first.
            first = max(0, bucket - role.width * role.shape.largest_weight)
            merged = 4 * sum(w.numel for w in role.shape.weights if w.is_linear)
            buffers += max(min(first, merged), min(bucket, merged - first))
        freed = replace(self.idle(awake=False), weights=self.resting_bytes)
        return freed + Usage(publication=buffers)

    def _gathered_to_publish(self, bucket: int, biggest: int) -> int:
        """Return the size of the weights that are gathered for a bucket of `bucket` bytes.

        Weights are gathered up to the bucket limit as if they were float32, and at least one at a
        time. `biggest` is the size of the largest of them in bytes.
        """
        role = self.role
        limit = BUCKET_BYTES[self.constants.device] * role.width // 4
        if role.sharded:
            return max(min(bucket, limit), biggest)
        split = [w.numel for w in role.shape.weights if local_size(role, w) < w.numel]
        together = min(bucket, limit, role.width * sum(split))
        if role.adapter_only or not split:
            return together
        return max(together, role.width * max(split))


def _backward(sizes: PassBytes, *, earlier: int, summed: int) -> Usage:
    """Return the peak of a backward pass.

    At the start, all activations and the logits exist; then activations are freed while gradients
    accumulate.
    """
    start = Usage(activations=sizes.saved, logits=sizes.backward_logits, gradients=earlier)
    layer = sizes.recomputed + sizes.training
    middle = Usage(activations=sizes.saved + layer, gradients=earlier)
    end = Usage(activations=layer, gradients=summed)
    return largest(start, middle, end)
