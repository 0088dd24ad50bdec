"""`python -m openrlhf.cli.serve_rm`: a trained reward model as an HTTP server, for
`--reward.remote_url` and others.
"""

from openrlhf.cli.common import command

main = command("serve-rm", __name__)
