"""`python -m openrlhf.cli.serve_rm`: a trained reward model as an HTTP server, for `--reward.remote_url` and others."""

from openrlhf.cli.common import one_process
from openrlhf.config.serving import ServeConfig

main = one_process(ServeConfig, "serve_rm", "openrlhf.serving.server:run_server", on_ray=False)

if __name__ == "__main__":
    main()
