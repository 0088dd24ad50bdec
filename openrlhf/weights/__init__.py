"""Weight publication: the path of the weights from the trainer to the engines.

Contract
--------

**Parts.** An encoder (`encoders`) turns the policy's weights into a manifest (`manifest`) and a
stream of tensors. The sender (`sender`) packs the stream into the manifest's buckets (`buckets`),
hashes each bucket, and sends it through a channel (`transport`), which does not interpret the
bytes. The receiver (`receiver`) passes the tensors to the vLLM worker's loader and writes a
receipt, which the engine compares with the manifest (`receipts`). The publisher (`publisher`)
coordinates these parts. The sender and the receivers cut the manifest into the same buckets,
because they all call `WeightManifest.buckets`.

**Who calls what, in this order.** The publisher, in the controller, calls the ranks of the policy
and the engines:

Step 1: `weight_address` on the policy, then `join` on the engines and `join_weight_group` on the
policy. These calls form a weight group. A publication skips the calls if the last publication's
group has the same engines. A refit never skips them, because the engine's process is new.

Step 2: `weight_manifest` on the policy. Rank 0's result is used.

Step 3: `receive` on the engines and `send_weights` on the policy, at the same time. An engine
pauses itself, its workers receive all buckets and then the sender's hashes, and the engine verifies
its workers' receipts.

Step 4: `resume` on the engines, after all engines have verified the version.

**What may overlap.** A publication, a refit of a restarted engine and the launch of an update
exclude each other (`WeightPublisher.sending`). If an update was launched before a refit, the refit
waits for it, for as long as the update may take: a policy process runs one call at a time. Samples
may be in progress; running samples are paused in step 3 and continue with the new weights after
step 4. During a refit, the other engines keep serving. During step 3, the trainer gathers and packs
a bucket while the engines load the previous bucket. The memory of a tensor may be reused, because
each tensor is packed before the next tensor is requested.

**What is guaranteed.** An engine that serves a version holds exactly the tensors of its manifest:
in each of its workers, the hash of every bucket equals the hash that was sent, every tensor was
loaded exactly once, no layer has stale values, and no layer uses a stale packed copy. All engines
resume with the same version. Every wait has a deadline.

**What happens on failure.** A sender or receiver that fails leaves the group, so that the other
members fail immediately instead of at their deadline. A failed publication leaves no group behind.
An engine that did not receive its version stays paused, and refuses to resume until a later
publication succeeds. The publisher checks which engines are lost. If any engine is lost, the
publisher publishes again to the remaining engines, and the lost engines are refitted after their
restart. Otherwise, the publisher raises the error, together with the engines' errors.
"""
