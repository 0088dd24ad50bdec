"""`openrlhf pipeline FILE.yaml`: stages in one file, each started when the stages before it are
done.
"""

from openrlhf.cli.common import command

main = command("pipeline", __name__)
