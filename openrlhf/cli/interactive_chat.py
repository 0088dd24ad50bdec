"""`python -m openrlhf.cli.interactive_chat`: a conversation with a model."""

from openrlhf.cli.common import command

main = command("chat", __name__)
