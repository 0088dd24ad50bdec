"""Everything a weight passes on its way from the trainer to the engines.

Contract
--------

**Parts.** An encoder (`encoders`) turns the policy's weights into a manifest (`manifest`) and a
stream of tensors. The sender (`sender`) packs the stream into the manifest's buckets (`buckets`),
hashes each, and sends it through a channel (`transport`), which does not know what it carries. The
receiver (`receiver`) hands the tensors to the loader of vLLM's worker and writes a receipt, which
the engine compares with the manifest (`receipts`). The publisher (`publisher`) conducts all of
them. Sender and receivers cut the manifest into the same buckets, because both call
`WeightManifest.buckets`.

**Who calls what, in this order.** The publisher, in the controller, calls the ranks of the policy
and the engines:

1. `weight_address` on the policy, then `join` on the engines and `join_weight_group` on the policy:
   they form a weight group. Left out if the group of the last publication has the same engines.
2. `weight_manifest` on the policy. The answer of rank 0 counts.
3. `receive` on the engines and `send_weights` on the policy, at the same time. An engine pauses
   itself, its workers receive bucket after bucket and then the hashes of the sender, and the engine
   verifies the receipts of its workers.
4. `resume` on the engines, after all of them have verified the version.

**What may overlap.** A publication, a refit of a restarted engine and the launch of an update
exclude each other (`WeightPublisher.sending`). An update that is launched before a refit is
finished before it, because a policy process runs one call at a time. Samples may be under way: they
are frozen in step 3 and continue with the new weights after step 4. During a refit the other
engines serve. Within step 3 the trainer gathers and packs a bucket while the engines load the
previous one. A packed tensor may be overwritten: each is copied before the next is requested.

**What is guaranteed.** An engine that serves a version holds exactly the tensors of its manifest:
in each of its workers, the hash of every bucket equals the hash that was sent, every tensor was
loaded exactly once, no layer has old values, and no layer computes with an old packed copy. All
engines resume with the same version. Every wait has a deadline.

**What happens on failure.** A sender or receiver that fails leaves the group, so that the other
members fail at once and not at their deadline. A failed publication leaves no group behind. An
engine whose version did not arrive stays paused, and refuses to resume until a later publication
succeeds. The publisher asks which engines are lost. If some are, it publishes again to the others,
and the lost ones are refitted after their restart. Otherwise it raises the error, together with the
errors of the engines.
"""
