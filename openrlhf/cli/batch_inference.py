"""`python -m openrlhf.cli.batch_inference`: answers to the prompts of a dataset, or rewards of
answers, in a file.
"""

from openrlhf.cli.common import command

main = command("batch_inference", __name__)
