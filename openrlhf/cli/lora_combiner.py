"""`python -m openrlhf.cli.lora_combiner`: merge an adapter into its base model."""

from openrlhf.cli.common import command

main = command("lora_combiner", __name__)
