"""`openrlhf reward test`: a reward function, server or verifier on a dataset, before any training."""

from openrlhf.cli.common import command

main = command("reward", __name__)
